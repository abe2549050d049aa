"""Storage of a checkpoint's files: reading, atomic publishing, recognition, removal."""
