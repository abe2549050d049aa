"""The private names of torch that this package uses, each with its reason. Tested with torch 2.9.0 and 2.13.0."""
