"""Where the files of a checkpoint lie: read, published in one step, recognised, removed."""
