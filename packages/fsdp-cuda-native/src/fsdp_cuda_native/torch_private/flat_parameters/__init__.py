"""A unit's flat parameter: what is in it, how it is gathered and freed, and what users write to it."""
