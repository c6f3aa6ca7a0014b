"""Training checkpoints: write everything that a run needs to go on, read back exactly that."""
