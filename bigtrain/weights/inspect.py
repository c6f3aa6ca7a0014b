"""What is in a folder of weights, and which rank would read which bytes of it. Torch-free for safetensors."""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

from bigtrain import partition
from bigtrain.weights.folder import Folder, open_folder
from bigtrain.weights.header import ITEM_BITS, TensorInfo


def inspect_folder(path: str, world_size: int | None = None) -> dict[str, Any]:
    """Everything that `bigtrain inspect` prints, as plain values.

    Args:
        path: folder with safetensors (or .bin) weights.
        world_size: also give, per rank, the bytes that a ZeRO-3 load on this many ranks would read.

    Raises:
        WeightsError: damaged or incomplete; `UsageError` for an impossible world size is the caller's.
    """
    folder = open_folder(path)
    infos = list(folder.tensors.values())
    table: dict[str, Any] = {
        "path": path,
        "model_type": folder.config.get("model_type"),
        "architectures": folder.config.get("architectures"),
        "parameters": sum(info.numel for info in infos),
        "bytes": folder.total_bytes,
        "dtypes": dict(Counter(info.dtype for info in infos)),
        "files": [
            {"name": os.path.basename(file), "bytes": os.path.getsize(file), "tensors": sum(i.file == file for i in infos)}
            for file in folder.files
        ],
        "tensors": [
            {"name": i.name, "dtype": i.dtype, "shape": list(i.shape), "bytes": i.nbytes, "file": os.path.basename(i.file),
             "begin": i.begin}
            for i in infos
        ],
    }  # fmt: skip
    if world_size is not None:
        table["world_size"] = world_size
        table["ranks"] = [_share(folder, rank, world_size) for rank in range(world_size)]
    return table


def byte_range(info: TensorInfo, rank: int, world_size: int) -> tuple[int, int]:
    """The bytes of the file that `rank` reads of one tensor at ZeRO-3 (types of whole bytes; stored as in the model)."""
    start, stop = partition.owned_range(info.numel, rank, world_size)
    item = ITEM_BITS[info.dtype] / 8
    return info.begin + math.floor(start * item), info.begin + math.ceil(stop * item)


def _share(folder: Folder, rank: int, world_size: int) -> dict[str, Any]:
    spans = [byte_range(info, rank, world_size) for info in folder.tensors.values()]
    return {"rank": rank, "bytes": sum(end - begin for begin, end in spans), "ranges": sum(end > begin for begin, end in spans)}


def report(table: dict[str, Any], limit: int | None = None) -> str:
    """The table as text; `limit` cuts the list of tensors."""
    dtypes = ", ".join(f"{count} x {dtype}" for dtype, count in table["dtypes"].items())
    lines = [
        f"{table['path']}: {table['model_type'] or 'no config.json'}, {len(table['tensors'])} tensors ({dtypes}), "
        f"{table['parameters']:,} values, {_size(table['bytes'])}",
        *(f"  {file['name']}: {file['tensors']} tensors, {_size(file['bytes'])}" for file in table["files"]),
    ]
    shown = table["tensors"][:limit]
    width = max((len(t["name"]) for t in shown), default=0)
    world = table.get("world_size")
    for t in shown:
        line = f"  {t['name']:<{width}}  {t['dtype']:<5} {t['shape']!s:<20} {_size(t['bytes']):>10}  {t['file']}"
        if world and t["begin"] >= 0:
            info = TensorInfo(t["name"], t["file"], t["dtype"], tuple(t["shape"]), t["begin"], t["bytes"])
            line += "  " + " ".join("{}-{}".format(*byte_range(info, rank, world)) for rank in range(world))
        lines.append(line)
    if len(shown) < len(table["tensors"]):
        lines.append(f"  ... and {len(table['tensors']) - len(shown)} more (--all)")
    for share in table.get("ranks", ()):
        lines.append(f"  rank {share['rank']} of {world} reads {_size(share['bytes'])} in {share['ranges']} ranges")
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"
