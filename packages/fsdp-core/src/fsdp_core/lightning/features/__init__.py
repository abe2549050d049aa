"""What runs have beside sharding: a feature each, called at the moments of a run that it needs."""
