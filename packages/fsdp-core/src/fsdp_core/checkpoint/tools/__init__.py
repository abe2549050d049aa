"""What is done to checkpoints outside of a run: described, listed, compared, converted."""
