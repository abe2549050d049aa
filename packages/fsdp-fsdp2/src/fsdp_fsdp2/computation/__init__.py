"""Options about how units compute: activations, compilation, float8, and when units are gathered and freed."""
