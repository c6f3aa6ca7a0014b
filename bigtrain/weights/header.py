"""The header of a safetensors file: 8 bytes little-endian length, JSON, then the tensors' bytes. Torch-free.

Format: https://github.com/safetensors/safetensors#format. The parser is strict, because a header that is slightly wrong
means other bytes than the ones meant: duplicate keys, overlaps, holes, a length that does not match shape and dtype, or
bytes beyond the end are all refused, each with the file's name and both values.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain import standins
from bigtrain.errors import WeightsError
from bigtrain.runfile import once

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor's bytes lie: `[begin, begin + nbytes)` of `file`, counted from the start of the file.

    Attributes:
        file: path of the file.
        dtype: safetensors' name of the type ("BF16", "F32", ...).
        shape: full shape.
        begin: first byte; -1 where the file is not laid out flat (a .bin file).
        nbytes: number of bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def byte_length(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor of this type and shape (rounded up for the types under 8 bits)."""
    return -(-math.prod(shape) * ITEM_BITS[dtype] // 8)


def read_header(path: str | Path) -> list[TensorInfo]:
    """The tensors of one safetensors file in the order of their bytes, checked against the file's length.

    Raises:
        WeightsError: the file is missing, cut off or damaged; says expected and actual.
    """
    return parse_header(str(path), *_header_text(str(path)))


def read_metadata(path: str | Path) -> dict[str, str]:
    """What a safetensors file says of itself, by its writer's names; nothing else of the header is checked.

    Raises:
        WeightsError: as `read_header`, where there is no header to read.
    """
    found: dict[str, str] = _load_json(str(path), _header_text(str(path))[0]).get("__metadata__", {})
    return found


def _header_text(path: str) -> tuple[bytes, int]:
    """The JSON part, and the length of the whole file in bytes."""
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(8), size)
            text = b""
            while len(text) < length and (part := file.read(length - len(text))):
                text += part
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}. Download or copy this file again.", file=path) from error
    return text, size


def _header_length(path: str, first: bytes, size: int) -> int:
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if (len(first) < 8 or 8 + length > size) and (why := standins.instead(path)):
        raise WeightsError(f"{path} is {why}.", file=path)
    if len(first) < 8:
        raise WeightsError(
            f"{path}: {size} bytes long, a safetensors file has at least 8. The file is cut off: copy it again.", file=path
        )
    if length > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path}: the header claims {length} bytes, the format allows {MAX_HEADER_BYTES}. "
            "Not a safetensors file, or damaged.",
            file=path,
        )
    if 8 + length > size:
        raise WeightsError(
            f"{path}: the header needs {8 + length} bytes, the file has {size}. The file is cut off: copy it again.", file=path
        )
    return length


def parse_header(path: str, text: bytes, size: int) -> list[TensorInfo]:
    """Parse and check the JSON part; `size` is the length of the whole file in bytes."""
    table = _load_json(path, text)
    table.pop("__metadata__", None)
    base = 8 + len(text)
    infos = sorted(
        (_tensor(path, name, entry, base) for name, entry in table.items()), key=lambda info: (info.begin, info.nbytes)
    )
    position = base
    for info in infos:
        if info.begin != position:
            what = "overlaps the tensor before it" if info.begin < position else "leaves a hole before it"
            raise WeightsError(
                f"{path}: tensor {info.name} {what}: it starts at byte {info.begin}, expected {position}. "
                "The header is damaged: copy the file again.",
                file=path,
                tensor=info.name,
            )
        position += info.nbytes
    if position != size:
        what = "The file is cut off" if position > size else "The file has bytes that belong to no tensor"
        raise WeightsError(
            f"{path}: the header's tensors end at byte {position}, the file has {size} bytes. {what}: copy it again.", file=path
        )
    return infos


def _load_json(path: str, text: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    if not text.startswith(b"{"):
        raise WeightsError(f"{path}: the header does not start with '{{': not a safetensors file, or damaged.", file=path)
    try:
        table = json.loads(text.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not valid JSON ({error}): copy the file again.", file=path) from error
    if not isinstance(table, dict):
        raise WeightsError(f"{path}: the header is not a JSON object: damaged.", file=path)
    metadata = table.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{path}: __metadata__ must map text to text: damaged header.", file=path)
    return table


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor(path: str, name: str, entry: Any, base: int) -> TensorInfo:
    def bad(why: str) -> WeightsError:
        return WeightsError(f"{path}: tensor {name}: {why}. The header is damaged: copy it again.", file=path, tensor=name)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        keys = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise bad(f"expected the keys dtype, shape and data_offsets, found {keys}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise bad(f"unknown dtype {dtype!r}, known are {', '.join(ITEM_BITS)}")
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise bad(f"shape {shape!r} is not a list of counts")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise bad(f"data_offsets {offsets!r} are not two byte counts")
    begin, end = offsets
    if end - begin != byte_length(dtype, shape):
        raise bad(
            f"data_offsets {offsets} span {end - begin} bytes, shape {shape} of {dtype} needs {byte_length(dtype, shape)}"
        )
    return TensorInfo(name, path, dtype, tuple(shape), base + begin, end - begin)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """The first bytes of a file that will hold `tensors` (name, dtype, shape) in this order.

    Returns:
        The length prefix and JSON, padded with blanks to a multiple of 8 bytes, and each tensor's first byte in the file.
    """
    table: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begins, position = [], 0
    for name, dtype, shape in tensors:
        nbytes = byte_length(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        begins.append(position)
        position += nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + begin for begin in begins]
