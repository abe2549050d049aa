"""Starts ranks and scripts in processes of their own, and tells a rank what it is."""
