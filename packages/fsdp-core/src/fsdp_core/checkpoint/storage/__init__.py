"""Storage of a checkpoint's files: reading, atomic commit, recognition, removal."""
