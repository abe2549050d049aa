"""Lightning integration of the XLA strategies: accelerators, launchers, metrics and rank placement."""
