"""``strategy="xla_fsdp"``: one rank per XLA device, sharded by ``XlaFullyShardedDataParallel``."""
