"""``strategy="xla_fsdp_spmd"``: one process drives all XLA devices of a host, and XLA's partitioner shards."""
