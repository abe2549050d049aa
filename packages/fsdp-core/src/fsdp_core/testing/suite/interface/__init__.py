"""What a plugin declares, and the contracts that its classes implement."""
