"""Checkpoints under Trainer and Fabric, exact resume, and the position of the dataloader."""
