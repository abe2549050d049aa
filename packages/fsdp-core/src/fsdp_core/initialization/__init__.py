"""A model before it is sharded: units marked, built without memory or in parts, and given its values."""
