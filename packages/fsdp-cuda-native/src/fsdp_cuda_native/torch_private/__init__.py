"""Everything that uses private names of torch's FSDP, each with its reason."""
