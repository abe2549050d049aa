"""Trains a script's module for three steps in several ways that must agree: in one process, and on real ranks."""
