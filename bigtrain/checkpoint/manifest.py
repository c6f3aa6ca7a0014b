"""The JSON of a checkpoint as frozen dataclasses; strict in what it reads. FORMAT.md is the definition. Torch-free."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

from bigtrain import standins
from bigtrain.errors import CheckpointError, UnreadableError

VERSION = 1
COMMIT_FORMAT, RANK_FORMAT, RUN_FORMAT = "bigtrain-checkpoint", "bigtrain-checkpoint-rank", "bigtrain-run-state"
CHUNK_BYTES = (
    4 << 20
)  # one hash per 4 MiB: 24,000 hashes for the 96 GB of an 8B model, and little to read beyond a slice's edge
ALIGN_BYTES = 64

# safetensors' names of element types and their size in bytes
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedSlice:
    """Elements `[start, stop)` of the flattened logical tensor (`kind`, `param`), at byte `offset` of a rank's data file."""

    param: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int
    xxh3: tuple[str, ...] = ()
    flat: tuple[str, int] | None = None  # (name of the saver's flat tensor, position in it) where block scales belong to it

    @property
    def key(self) -> tuple[str, str]:
        """(kind, param): names the logical tensor."""
        return self.kind, self.param

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the slice in its data file."""
        return (self.stop - self.start) * self.item_bytes

    @property
    def numel(self) -> int:
        """Elements of the whole logical tensor."""
        return math.prod(self.shape)

    def entry(self) -> dict[str, Any]:
        """As it stands in the manifest. No deep copies: this runs beside training, which waits for the interpreter meanwhile."""
        return {name: value for name in _NAMES if (value := getattr(self, name)) is not None}


_NAMES = tuple(f.name for f in fields(SavedSlice))


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    """What one rank wrote."""

    rank: int
    world_size: int
    data_name: str
    data_bytes: int
    slices: tuple[SavedSlice, ...]
    chunk_bytes: int = CHUNK_BYTES
    header_bytes: int = 0  # the data file's own header and its hash; 0 where the writer did not say
    header_xxh3: str = ""
    state: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The bytes of the manifest file."""
        data: dict[str, Any] = {"name": self.data_name, "bytes": self.data_bytes}
        if self.header_bytes:
            data |= {"header_bytes": self.header_bytes, "header_xxh3": self.header_xxh3}
        body = {
            "format": RANK_FORMAT, "version": VERSION, "rank": self.rank, "world_size": self.world_size,
            "data": data, "chunk_bytes": self.chunk_bytes,
            "slices": [s.entry() for s in self.slices], "state": self.state,
        }  # fmt: skip
        return json.dumps(body, separators=(",", ":")).encode()


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The last file of a checkpoint: makes it exist."""

    step: int
    world_size: int
    files: dict[str, tuple[int, str]]  # name -> (bytes, xxh3_64 in hex)

    def to_json(self) -> bytes:
        """The bytes of COMMIT."""
        files = {name: {"bytes": size, "xxh3": digest} for name, (size, digest) in sorted(self.files.items())}
        body = {"format": COMMIT_FORMAT, "version": VERSION, "step": self.step, "world_size": self.world_size, "files": files}
        return json.dumps(body, indent=1).encode()


def stem(rank: int, world_size: int) -> str:
    """File name of a rank without its ending."""
    return f"rank-{rank:05d}-of-{world_size:05d}"


def parse_commit(raw: bytes, path: str) -> Commit:
    """Read COMMIT.

    Raises:
        CheckpointError: not JSON, another format or version, or a field of the wrong kind.
    """
    body = _parse(raw, path, COMMIT_FORMAT)
    try:
        files = {str(n): (_count(f["bytes"]), str(f["xxh3"])) for n, f in body["files"].items()}
        commit = Commit(step=_count(body["step"]), world_size=_count(body["world_size"]), files=files)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _damaged(path, f"field {problem}") from problem
    if len(files) != commit.world_size + 1:  # before a name is made for each of what may be any number
        raise _damaged(path, f"it lists {len(files)} files for {commit.world_size} ranks")
    wanted = {"run.json"} | {stem(r, commit.world_size) + ".json" for r in range(commit.world_size)}
    if set(files) != wanted:
        raise _damaged(path, f"it lists {sorted(files)} where {sorted(wanted)} belong")
    return commit


def parse_manifest(raw: bytes, path: str) -> RankManifest:
    """Read a rank's manifest and check that it is consistent in itself.

    Raises:
        CheckpointError: as `parse_commit`, or a slice that does not fit its tensor or its file.
    """
    body = _parse(raw, path, RANK_FORMAT)
    try:
        slices = tuple(_slice(s) for s in body["slices"])
        manifest = RankManifest(
            rank=_count(body["rank"]), world_size=_count(body["world_size"]), data_name=str(body["data"]["name"]),
            data_bytes=_count(body["data"]["bytes"]), slices=slices, chunk_bytes=_count(body["chunk_bytes"]),
            header_bytes=_count(body["data"].get("header_bytes", 0)), header_xxh3=str(body["data"].get("header_xxh3", "")),
            state=dict(body["state"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _damaged(path, f"field {problem}") from problem
    if "/" in manifest.data_name or manifest.data_name.startswith("."):
        raise _damaged(path, f"data file {manifest.data_name!r} is not a name in this folder")
    if manifest.header_bytes > manifest.data_bytes:
        raise _damaged(path, f"a header of {manifest.header_bytes} bytes in a file of {manifest.data_bytes}")
    for s in slices:
        chunks = -(-s.nbytes // manifest.chunk_bytes) if manifest.chunk_bytes else -1
        inside = manifest.header_bytes <= s.offset <= s.offset + s.nbytes <= manifest.data_bytes and s.offset % ALIGN_BYTES == 0
        if not (0 <= s.start <= s.stop <= s.numel) or not inside or len(s.xxh3) != chunks:
            raise _damaged(path, f"slice {s.kind}/{s.param} [{s.start}, {s.stop}) at byte {s.offset} does not fit")
    return manifest


def _parse(raw: bytes, path: str, wanted: str) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as problem:
        if os.path.isfile(path) and (why := standins.instead(path)):
            raise CheckpointError(f"{path} is {why}.", path) from problem
        raise _damaged(path, f"not JSON ({problem})") from problem
    if not isinstance(body, dict) or body.get("format") != wanted:
        raise _damaged(path, f"it does not say format {wanted!r}")
    if body.get("version") != VERSION:
        newer = isinstance(body.get("version"), int) and body["version"] > VERSION  # which the bigtrain that wrote it can read
        kind = UnreadableError if newer else CheckpointError
        raise kind(f"{path} is of format version {body.get('version')!r}; this bigtrain reads {VERSION}", path)
    return body


def parse_run(raw: bytes, path: str) -> dict[str, Any]:
    """Read run.json; same errors as `parse_commit`."""
    body = _parse(raw, path, RUN_FORMAT)
    for key in ("state", "layout"):
        if not isinstance(body.get(key), dict):
            raise _damaged(path, f"{key!r} is not an object")
    return body


def _slice(body: dict[str, Any]) -> SavedSlice:
    if body["dtype"] not in ITEM_BYTES:
        raise ValueError(f"dtype {body['dtype']!r}")
    return SavedSlice(
        param=str(body["param"]), kind=str(body["kind"]), dtype=body["dtype"], shape=tuple(_count(n) for n in body["shape"]),
        start=_count(body["start"]), stop=_count(body["stop"]), offset=_count(body["offset"]),
        xxh3=tuple(map(str, body["xxh3"])), flat=(str(flat[0]), _count(flat[1])) if (flat := body.get("flat")) else None,
    )  # fmt: skip


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}. This checkpoint cannot be used; take another one.", path)
