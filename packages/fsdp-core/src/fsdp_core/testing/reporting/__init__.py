"""Chooses the clauses of a pytest session, and reports how each has ended."""
