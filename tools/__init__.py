"""What runs this project's tests: the environments of noxfile.py, the choice of tests, and what they may cost."""
