"""Full checkpoints: the single file that a plain Trainer writes, also made from a sharded folder."""
