"""Training checkpoints: named flat slices with hashes, committed atomically, readable on any number of ranks.

FORMAT.md beside this file is the definition.

Pure, torch-free    manifest (the JSON), reshard (from saved slices to wanted ones)
The disk            files (the only module that touches it), datafile (large files, past the page cache), hashing, store (finds, commits and
                    retires folders), second (copies in another place), verify (every byte against its hash)
State as slices     slices (one of them), live (all of an engine's), blocks (8-bit moments under another partition), rng, userstate
Saving              save (beside training), pieces (what a rank writes), copying, snapshot (copies on the host), confirm (all have written)
Loading             load, neighbours (memory of the host's other ranks), fit (what would not load, said before anything is built)
For the engine      native (this format), deepspeed_format (DeepSpeed's, written and read), deepspeed_import (going on from DeepSpeed's own)
Commands            cli, export
"""
