"""What XLA's strategies do to Lightning: its accelerators, launchers and metrics, and where a rank is."""
