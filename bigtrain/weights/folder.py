"""A folder of weights: which files, which tensors, checked against each other before any tensor is read.

Torch-free for safetensors. A Hugging Face folder holds `model.safetensors`, or shards and
`model.safetensors.index.json`, or the same as `pytorch_model.bin` pickles (read through torch's restricted
unpickler, file by file, memory-mapped).
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain import standins
from bigtrain.errors import WeightsError
from bigtrain.guards import listing
from bigtrain.runfile import once
from bigtrain.weights.header import TensorInfo, read_header

# The first that exists is taken, as in `from_pretrained`: a single file comes before an index (transformers 5.24,
# `modeling_utils.py: _get_resolved_checkpoint_files`).
SAFE_NAMES = ("model.safetensors", "model.safetensors.index.json")
PICKLE_NAMES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

logger = logging.getLogger(__name__)


@dataclass
class Folder:
    """The tensors of one folder of weights.

    Attributes:
        path: the folder.
        tensors: name in the file -> where it lies.
        files: the weight files, in the order of their names.
        config: config.json, {} if there is none.
        pickled: True for .bin files; then `loaded` maps a file to its memory-mapped tensors.
    """

    path: str
    tensors: dict[str, TensorInfo]
    files: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    pickled: bool = False
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def open_folder(path: str | Path) -> Folder:
    """Read every header of a folder of weights and check that the files are whole.

    Raises:
        WeightsError: something is missing, cut off or damaged; names file, tensor, expected and actual.
    """
    path = str(path)
    if not os.path.isdir(path):
        what = "not a folder" if os.path.exists(path) else "no such folder"
        raise WeightsError(f"{path}: {what}. Give the folder that holds config.json and the weights.", file=path)
    config = _read_config(path)
    found = _chosen(path)
    weight_map = read_index(os.path.join(path, found)) if found.endswith(".index.json") else None
    names = sorted(set(weight_map.values())) if weight_map is not None else [found]
    folder = Folder(path, {}, [os.path.join(path, name) for name in names], config, pickled=found in PICKLE_NAMES)
    _refuse_absent_files(folder, found)
    for file in folder.files:
        for info in _pickle_infos(folder, file) if folder.pickled else read_header(file):
            other = folder.tensors.get(info.name)
            if other is not None:
                raise WeightsError(
                    f"{path}: tensor {info.name} is in two files, {os.path.basename(other.file)} and {os.path.basename(file)}.",
                    file=file,
                    tensor=info.name,
                )
            folder.tensors[info.name] = info
    if weight_map is not None:
        _check_index(folder, found, weight_map)
    return folder


def _chosen(path: str) -> str:
    """The file or index that the weights are taken from."""
    known = (*SAFE_NAMES, *PICKLE_NAMES)
    present = [name for name in known if os.path.isfile(os.path.join(path, name))]
    if not present:
        broken = next((name for name in known if os.path.lexists(os.path.join(path, name))), None)
        why = f"; {broken} is {standins.instead(os.path.join(path, broken))}" if broken else ""
        raise WeightsError(
            f"{path}: holds none of {', '.join(known)}; it holds: {_listing(path)}{why}. "
            "Download the weights, or name the folder that has them.",
            file=os.path.join(path, broken) if broken else path,
        )
    if present[0] in SAFE_NAMES and present[1:2] == [SAFE_NAMES[1]]:
        logger.warning(
            "%s holds both %s and %s: the weights are taken from %s, as from_pretrained does", path, *present[:2], present[0]
        )
    return present[0]


def _listing(path: str) -> str:
    names = sorted(os.listdir(path))
    return listing(names, 8) or "nothing"


def _read_config(path: str) -> dict[str, Any]:
    file = os.path.join(path, "config.json")
    if not os.path.lexists(file):
        return {}
    if not os.path.isfile(file):  # also a pipe, which would be waited for
        raise WeightsError(f"{file} is {standins.instead(file)}.", file=file)
    try:
        with open(file, encoding="utf-8") as handle:
            config = json.load(handle)
    except OSError as error:
        raise WeightsError(f"{file} is {standins.instead(file) or f'not readable: {error.strerror}'}.", file=file) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file} is {standins.instead(file) or f'not valid JSON ({error})'}.", file=file) from error
    if not isinstance(config, dict):
        raise WeightsError(f"{file}: expected a JSON object, found {standins.kind(config)}.", file=file)
    return config


def read_index(file: str) -> dict[str, str]:
    """`weight_map` of an index: tensor name -> file name, a plain name inside the same folder."""
    try:
        with open(file, encoding="utf-8") as handle:
            index = json.load(handle, object_pairs_hook=once)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}: copy the file again.", file=file) from error
    except (ValueError, RecursionError) as error:
        why = standins.instead(file) or f"not valid JSON ({error}): copy the file again"
        raise WeightsError(f"{file} is {why}.", file=file) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{file}: has no weight_map of tensor to file: not an index, or damaged.", file=file)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or shard != os.path.basename(shard) or shard in (".", "..") or "\0" in shard:
            raise WeightsError(f"{file}: tensor {name} points to {shard!r}, which is not a file of this folder.", file, name)
    return weight_map


def _refuse_absent_files(folder: Folder, index: str) -> None:
    absent = [os.path.basename(file) for file in folder.files if not os.path.isfile(file)]
    if absent:
        first = os.path.join(folder.path, absent[0])
        link = f" ({absent[0]} is {standins.instead(first)})" if os.path.lexists(first) else ""
        raise WeightsError(
            f"{folder.path}: {index} lists {len(folder.files)} files, {len(absent)} are missing: {', '.join(absent[:5])}"
            f"{' ...' if len(absent) > 5 else ''}{link}. The folder holds: {_listing(folder.path)}. Download the missing files.",
            file=first,
        )


def _check_index(folder: Folder, index: str, weight_map: dict[str, str]) -> None:
    for name, shard in weight_map.items():
        info = folder.tensors.get(name)
        if info is None or os.path.basename(info.file) != shard:
            where = "no file of the folder has it" if info is None else f"it is in {os.path.basename(info.file)}"
            raise WeightsError(
                f"{folder.path}: {index} says that tensor {name} is in {shard}, but {where}. "
                "Index and files do not belong together: copy both again.",
                file=os.path.join(folder.path, shard),
                tensor=name,
            )


def _pickle_infos(folder: Folder, file: str) -> list[TensorInfo]:
    from bigtrain.weights import pickles

    folder.loaded[file] = pickles.read(file)
    return pickles.describe(file, folder.loaded[file])
