"""After a load: a hash of every gathered tensor against the same tensor made again from the file, in full."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xxhash

from bigtrain import ranks, zero
from bigtrain.errors import WeightsError
from bigtrain.weights.folder import Folder
from bigtrain.weights.mapping import Part
from bigtrain.weights.plan import LoadPlan
from bigtrain.weights.read import Reader, as_bytes
from bigtrain.weights.slots import Piece, Slot

CHUNK_BYTES = 16 << 20


def verify_plan(plan: LoadPlan, folder: Folder) -> int:
    """Compare every filled tensor with the file; collective. Each tensor is read from the file by one rank.

    Returns:
        The number of tensors compared.

    Raises:
        WeightsError: on the rank that found a difference, with both hashes; RanksDisagreeError on the others.
    """
    wrong: list[str] = []
    with torch.no_grad(), Reader() as reader:
        for index, (slot, part) in enumerate(plan.filled):
            with zero.gathered([slot.tensor] if slot.partitioned else []):  # type: ignore[list-item]
                if index % ranks.world_size() == ranks.rank() % ranks.world_size():
                    held, stored = _hash_tensor(slot.tensor), _hash_file(slot, part, folder, reader)
                    if held != stored:
                        wrong.append(f"  {slot.name}: in the model {held}, in the file {stored} ({part.sources[0]})")
    with ranks.together("verifying the loaded weights"):
        if wrong:
            raise WeightsError(
                f"{folder.path}: {len(wrong)} tensors are not what the file holds:\n" + "\n".join(wrong[:12]) + "\n"
                "The files changed during the load, or memory or disk are faulty: load again."
            )
    return len(plan.filled)


def _hash_tensor(tensor: torch.Tensor) -> str:
    digest = xxhash.xxh3_128()
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // flat.element_size()
    for first in range(0, flat.numel(), step):
        digest.update(as_bytes(flat[first : first + step].cpu().contiguous()))
    return digest.hexdigest()


def _hash_file(slot: Slot, part: Part, folder: Folder, reader: Reader) -> str:
    digest = xxhash.xxh3_128()
    for flat in _file_chunks(slot, part, folder, reader):
        digest.update(as_bytes(flat))
    return digest.hexdigest()


def _file_chunks(slot: Slot, part: Part, folder: Folder, reader: Reader) -> Iterator[torch.Tensor]:
    from bigtrain.weights.load import read_ops, read_whole

    if part.runs is None:
        assert part.conversion is not None
        made = part.conversion.run(read_whole(part.sources, folder, reader, slot.dtype))
        yield made[part.made].reshape(-1).contiguous()
        return
    step = CHUNK_BYTES // slot.dtype.itemsize
    for first in range(0, slot.numel, step):
        flat = torch.empty(min(step, slot.numel - first), dtype=slot.dtype)
        reader.run(read_ops(part, Piece(first, flat), folder))
        yield flat
