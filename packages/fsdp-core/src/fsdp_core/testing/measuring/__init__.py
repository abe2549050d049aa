"""Measures what ranks use: host memory, collectives and disks."""
