"""Damaged checkpoints, made from a seed: every kind of harm that files come to."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import torch

SHAPES = {"embed.weight": (7, 6), "a.weight": (6, 5), "a.bias": (5,), "b.weight": (5, 6), "b.bias": (6,), "head.weight": (7, 6)}
SHARDS = {"model-00001-of-00002.safetensors": list(SHAPES)[:3], "model-00002-of-00002.safetensors": list(SHAPES)[3:]}
INDEX = "model.safetensors.index.json"
DTYPES = ["BF16", "F16", "F32", "F64", "I8", "U8", "I16", "U16", "I32", "I64", "BOOL", "F8_E4M3", "bf16", "", 3, None]


class Net(torch.nn.Module):
    """A model whose state dict has exactly `SHAPES`."""

    def __init__(self):
        super().__init__()
        for name in ("embed", "a", "b", "head"):
            self.add_module(name, torch.nn.Module())
        for name, shape in SHAPES.items():
            module, leaf = name.split(".")
            self.get_submodule(module).register_parameter(
                leaf, torch.nn.Parameter(torch.full(shape, float("nan"), dtype=torch.bfloat16))
            )


def values() -> dict[str, torch.Tensor]:
    """What the undamaged files hold."""
    generator = torch.Generator().manual_seed(11)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


def pristine() -> dict[str, bytes]:
    """File name -> content of a sound two-shard checkpoint."""
    from bigtrain.weights.header import encode_header

    tensors, files = values(), {}
    for shard, names in SHARDS.items():
        head, _ = encode_header([(name, "BF16", SHAPES[name]) for name in names], {"format": "pt"})
        files[shard] = head + b"".join(tensors[name].view(torch.uint8).numpy().tobytes() for name in names)
    weight_map = {name: shard for shard, names in SHARDS.items() for name in names}
    files[INDEX] = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()
    return files


def write(files: dict[str, bytes], folder: Path) -> str:
    """Put the files into an existing or new folder, replacing what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        os.unlink(folder / name)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


def _reheaded(content: bytes, change) -> bytes:
    """The file with its header changed by `change(table)`; the tensor bytes stay."""
    length = struct.unpack("<Q", content[:8])[0]
    text = change(json.loads(content[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _entry_change(rng: random.Random, key: str, make):
    def change(table):
        name = rng.choice([name for name in table if name != "__metadata__"])
        table[name][key] = make(table[name][key])
        return table

    return change


def _duplicate(rng: random.Random):
    def change(table):
        name = rng.choice([name for name in table if name != "__metadata__"])
        extra = json.dumps({name: table[name]})[1:-1]
        return (json.dumps(table)[:-1] + ", " + extra + "}").encode()

    return change


def _rename(rng: random.Random):
    def change(table):
        name = rng.choice([name for name in table if name != "__metadata__"])
        table[name[:-1] + rng.choice("xyz")] = table.pop(name)
        return table

    return change


def _offsets(rng: random.Random):
    odd = [-2, 10**9, 2**64, 1.0, True, None, "4"]

    def make(pair):
        kind = rng.randrange(4)
        if kind == 0:
            shift = rng.choice([-8, -2, -1, 1, 2, 6, 64])
            return [pair[0] + shift, pair[1] + shift]
        if kind == 1:
            return [pair[0], pair[1] + rng.choice([-2, 2])]
        if kind == 2:
            return rng.choice([[], [pair[0]], [*pair, pair[1]], pair[::-1], {}, 7])
        pair = list(pair)
        pair[rng.randrange(2)] = rng.choice(odd)
        return pair

    return make


def _shape(rng: random.Random):
    return lambda shape: rng.choice(
        [[], [*shape, 1], shape[::-1], [-shape[0], -1], [2**40, 2**40], [1.5], ["6"], None, [True], [0]]
    )


def _drop(rng: random.Random):
    def change(table):
        table.pop(rng.choice([name for name in table if name != "__metadata__"]))
        return table

    return change


def damage(seed: int) -> tuple[str, dict[str, bytes]]:
    """`(what was done, files)` for a seed; a few changes are harmless by chance (blanks, metadata)."""
    rng = random.Random(seed)
    files = pristine()
    shard = rng.choice(list(SHARDS))
    content = files[shard]
    length = struct.unpack("<Q", content[:8])[0]
    kind = rng.choice(list(_KINDS))
    files = _KINDS[kind](rng, files, shard, content, length)
    return f"{kind} (seed {seed}, {shard})", files


def _put(name):
    def wrap(make):
        _KINDS[name] = lambda rng, files, shard, content, length: {**files, shard: make(rng, content, length)}
        return make

    return wrap


_KINDS: dict = {}
_put("truncated")(lambda rng, c, n: c[: rng.randrange(len(c))])
_put("truncated by a little")(lambda rng, c, n: c[: -rng.randrange(1, 9)])
_put("grown")(lambda rng, c, n: c + bytes(rng.randrange(1, 200)))
_put("emptied")(lambda rng, c, n: b"")
_put("length field")(
    lambda rng, c, n: struct.pack("<Q", rng.choice([0, 1, n - 1, n + 1, n + 8, 2**27, 2**63, 2**64 - 1])) + c[8:]
)
_put("header flips")(
    lambda rng, c, n: bytes(
        byte ^ (1 << rng.randrange(8)) if i in spots else byte for i, byte in enumerate(c)
    ) if (spots := {8 + rng.randrange(n) for _ in range(rng.randrange(1, 4))}) else c
)  # fmt: skip
_put("header noise")(lambda rng, c, n: c[:8] + rng.randbytes(n) + c[8 + n :])
_put("offsets")(lambda rng, c, n: _reheaded(c, _entry_change(rng, "data_offsets", _offsets(rng))))
_put("dtype")(lambda rng, c, n: _reheaded(c, _entry_change(rng, "dtype", lambda old: rng.choice(DTYPES[1:]))))
_put("shape")(lambda rng, c, n: _reheaded(c, _entry_change(rng, "shape", _shape(rng))))
_put("duplicate key")(lambda rng, c, n: _reheaded(c, _duplicate(rng)))
_put("renamed")(lambda rng, c, n: _reheaded(c, _rename(rng)))
_put("entry dropped")(lambda rng, c, n: _reheaded(c, _drop(rng)))
_put("deep")(lambda rng, c, n: _reheaded(c, lambda table: b'{"a":' + b"[" * 100_000))
_put("constants")(lambda rng, c, n: _reheaded(c, lambda table: json.dumps(table).replace("[0,", "[NaN,", 1).encode()))
_put("not an object")(lambda rng, c, n: _reheaded(c, lambda table: rng.choice([b"[]", b"3", b'"x"', b"{}", b"null", b" {}"])))
_put("metadata")(
    lambda rng, c, n: _reheaded(c, lambda table: {**table, "__metadata__": rng.choice([3, {"a": 1}, ["x"], None])})
)


def _index(change):
    def make(rng, files, shard, content, length):
        table = json.loads(files[INDEX])
        out = change(rng, table, shard)
        return {**files, INDEX: out if isinstance(out, bytes) else json.dumps(out).encode()}

    return make


def _with_map(rng, table, value):
    return {**table, "weight_map": {**table["weight_map"], rng.choice(list(SHAPES)): value}}


_OTHER = {shard: other for shard, other in zip(SHARDS, reversed(SHARDS))}
_KINDS |= {
    "shard deleted": lambda rng, files, shard, content, length: {k: v for k, v in files.items() if k != shard},
    "shard swapped": lambda rng, files, shard, content, length: {**files, shard: files[_OTHER[shard]]},
    "index cut": _index(lambda rng, table, shard: json.dumps(table).encode()[: rng.randrange(1, 300)]),
    "index names a file that is not there": _index(lambda rng, table, shard: _with_map(rng, table, "model-3.safetensors")),
    "index escapes": _index(
        lambda rng, table, shard: _with_map(rng, table, rng.choice(["../x", "/etc/passwd", "a/b", "", "."]))
    ),
    "index of odd type": _index(lambda rng, table, shard: _with_map(rng, table, rng.choice([3, None, [shard], {}]))),
    "index names a tensor that is not there": _index(
        lambda rng, table, shard: {**table, "weight_map": {**table["weight_map"], "c.weight": shard}}
    ),
    "index moves a tensor": _index(
        lambda rng, table, shard: {**table, "weight_map": {k: _OTHER[v] for k, v in table["weight_map"].items()}}
    ),
    "index lists one shard": _index(
        lambda rng, table, shard: {**table, "weight_map": {k: v for k, v in table["weight_map"].items() if v == shard}}
    ),
    "index duplicate": _index(lambda rng, table, shard: json.dumps(table).replace("a.bias", "a.weight").encode()),
    "index without map": _index(
        lambda rng, table, shard: rng.choice([b"{}", b"[]", b'{"weight_map": {}}', b'{"weight_map": 3}'])
    ),
    "index noise": _index(lambda rng, table, shard: rng.randbytes(100)),
}
