"""Uses of private names of torch's FSDP, each with its reason."""
