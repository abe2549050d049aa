"""What the front ends save and load."""
