"""Training checkpoints: named flat slices with hashes, committed atomically, readable on any number of ranks.

FORMAT.md beside this file is the definition. `manifest` and `reshard` are pure and torch-free; `files` is the only module that
touches the disk; `store` finds, commits and retires folders; `save` and `load` move tensors.
"""
