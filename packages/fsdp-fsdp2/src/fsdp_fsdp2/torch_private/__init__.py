"""Uses of names of torch that are private or untyped, each with its reason. Tested with torch 2.9, 2.13 and 2.15."""
