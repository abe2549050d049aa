"""What is in the files of a checkpoint."""
