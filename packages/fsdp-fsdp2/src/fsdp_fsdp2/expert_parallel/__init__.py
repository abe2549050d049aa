"""Expert parallelism: experts that are divided among data-parallel ranks, and tokens that are sent to them."""
