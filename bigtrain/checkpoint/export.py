"""From a checkpoint of any number of ranks to a Hugging Face folder, without starting the training job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from bigtrain import ranks
from bigtrain.checkpoint import files, store
from bigtrain.checkpoint.verify import verify_slice
from bigtrain.errors import CheckpointError
from bigtrain.weights.deepspeed_export import export_weights
from bigtrain.weights.dtypes import TORCH
from bigtrain.weights.export import ExportReport
from bigtrain.weights.slots import Piece

# What a weight is taken from, the best first: the fp32 master, else the weight itself (frozen, or split from its master).
KINDS = ("master", "weight", "buffer")


@dataclass
class StoredWeights:
    """The weights in a checkpoint, memory-mapped; attributes as in `weights.deepspeed_export.WeightSource`."""

    path: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)


def export_checkpoint(
    checkpoint: Path,
    out_dir: str | Path,
    *,
    dtype: torch.dtype | str,
    model_dir: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> ExportReport:
    """Write the weights of a checkpoint as a Hugging Face folder in `dtype`; on one process or on several ranks.

    Every byte that is used is checked against its hash first. Little memory is needed: the data files are mapped.

    Args:
        checkpoint: a checkpoint folder, or a root whose newest whole one is meant.
        out_dir: folder to make.
        dtype: of every float tensor. Rounded from the fp32 master where the checkpoint holds one, else from the bf16 weight.
        model_dir: folder with config.json and tokenizer; by default what the checkpoint holds itself. With neither (a model
            that is not from transformers) the names stay as in training and only weights are written.
        max_shard_bytes: largest file.

    Raises:
        CheckpointError: damaged, or there is none.
        WeightsError: it does not match the model of `model_dir`; before anything is written.
    """
    with ranks.together(f"reading {checkpoint}"):
        opened = store.find(checkpoint)
        store.check_model_files(opened)
        source = _weights_in(opened)
    own = opened.folder / store.MODEL
    if model_dir is None and (own / "config.json").is_file():
        model_dir = own
    return export_weights(source, out_dir, dtype=dtype, model_dir=model_dir, max_shard_bytes=max_shard_bytes)


def _weights_in(opened: store.Opened) -> StoredWeights:
    maps = [_mapped(opened.data_path(m.rank), m.data_bytes) for m in opened.ranks]
    found = StoredWeights(str(opened.folder))
    for kind in KINDS:
        for (has, param), held in opened.index.items():
            if has != kind or param in found.shapes:
                continue
            found.shapes[param] = held[0][1].shape
            found.pieces[param] = [
                Piece(s.start, maps[rank][s.offset : s.offset + s.nbytes].view(TORCH[s.dtype])) for rank, s in held
            ]
    _check(opened)
    return found


def _mapped(path: Path, size: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _check(opened: store.Opened) -> None:
    """Hashes of all that will be used; each rank checks a share."""
    for m in opened.ranks:
        path = opened.data_path(m.rank)
        mine = [s for i, s in enumerate(m.slices) if s.kind in KINDS and i % ranks.world_size() == ranks.rank()]
        with files.reading(path) as handle:
            problems = [p for s in mine for p in verify_slice(handle, s, m.chunk_bytes, path)]
        if problems:
            raise CheckpointError("\n".join(problems[:10]), str(path))
