"""Runs a training script's fit on fake tensors, as one rank of many, before any of them is started."""
