"""The strategy names in Lightning."""
