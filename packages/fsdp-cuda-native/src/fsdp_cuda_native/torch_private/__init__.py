"""Uses of private names of torch's FSDP1, each with its reason. Tested with torch 2.9.0 and 2.13.0."""
