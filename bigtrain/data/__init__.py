"""Training data: sources, tokenise, pack, order, loader."""
