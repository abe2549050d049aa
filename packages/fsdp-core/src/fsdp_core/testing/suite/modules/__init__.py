"""Sharded modules: what each rank holds, and what users may do with a sharded module."""
