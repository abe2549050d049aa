"""A folder of every rank's parts and the one file that a plain Trainer writes of the same: there and back."""
