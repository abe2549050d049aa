"""Where ranks are started by others: launchers that Lightning knows, SLURM, Ray Train and notebooks."""
