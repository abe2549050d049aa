"""What multi-rank runs need on XLA's CPU client, which was not made for them. Never active on a TPU."""
