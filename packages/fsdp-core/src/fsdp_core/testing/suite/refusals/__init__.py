"""Errors for bad options, modules and checkpoints, raised before anything is trained or changed."""
