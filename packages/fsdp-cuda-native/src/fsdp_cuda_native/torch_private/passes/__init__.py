"""Forward and backward passes that FSDP1 does not expect, and what it leaves undone in those that it does."""
