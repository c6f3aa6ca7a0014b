"""Hashes of chunks of bytes, of what lies ready or while it is copied. Torch-free.

Each return into Python takes the interpreter from the thread that trains: in pieces that fit a processor's cache, thousands of times
a second, which cost a training step that is bound by launching kernels up to 17 % (docs/log.md). So all pieces of a block are one
call of a few lines of C (pastcache.c) that use the hash of the `xxhash` package through its extension module, and what lies ready
is one call for hundreds of tensors. Where the package does not export its functions, or nothing can be compiled, the same is done in Python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from bigtrain.memory import pastcache

PIECE_BYTES = 256 << 10  # hashed, then copied: stays in the second-level cache between the two


class ChunkHashes:
    """XXH3-64 of each `chunk_bytes` of a run of bytes that comes in parts.

    Args:
        chunk_bytes: the last chunk may be shorter.
    """

    def __init__(self, chunk_bytes: int):
        self._chunk, self._found = chunk_bytes, list[str]()
        code = native()
        self._state: _NativeState | _State = _State(chunk_bytes) if code is None else _NativeState(chunk_bytes, code)

    def take(self, source: memoryview, target: memoryview) -> None:
        """Copy the next bytes to `target`, which is as long and does not overlap, or is the same memory: then they are hashed only."""
        if len(source) != len(target):
            raise ValueError(f"{len(source)} bytes into {len(target)}")
        if len(source):
            self._found += self._state.take(source, target)

    def end(self) -> list[str]:
        """The hashes, 16 hexadecimal digits each."""
        if self._state.held:
            self._found.append(self._state.digest())
            self._state = _State(self._chunk)
        return self._found


def hash_runs(runs: Sequence[Sequence[memoryview]], chunk_bytes: int) -> list[list[str]]:
    """XXH3-64 of each `chunk_bytes` of every run, which is its parts one behind the other; as `ChunkHashes` gives them, in few calls."""
    code = native()
    if code is not None:
        return _hash_runs_native(runs, chunk_bytes, code)
    found = []
    for run in runs:
        hashes = ChunkHashes(chunk_bytes)
        for part in run:
            hashes.take(part, part)
        found.append(hashes.end())
    return found


def _hash_runs_native(runs: Sequence[Sequence[memoryview]], chunk: int, code: _Native) -> list[list[str]]:
    parts = [part for run in runs for part in run if len(part)]
    counts = [sum(len(part) > 0 for part in run) for run in runs]
    chunks = [-(-sum(map(len, run)) // chunk) for run in runs]
    sizes, digests = ctypes.c_size_t * max(1, len(parts)), (ctypes.c_uint64 * max(1, sum(chunks)))()
    state = code.create()
    try:
        found = code.hash_runs(
            code.functions, state, chunk, PIECE_BYTES, len(runs), (ctypes.c_size_t * max(1, len(runs)))(*counts),
            (ctypes.c_void_p * max(1, len(parts)))(*map(_address, parts)), sizes(*map(len, parts)), digests,
        )  # fmt: skip
    finally:
        code.free(state)
    if found != sum(chunks):
        raise RuntimeError(f"{found} hashes of {sum(chunks)} chunks")
    told = iter(digests)
    return [[f"{next(told):016x}" for _ in range(count)] for count in chunks]


class _State:
    """In Python."""

    def __init__(self, chunk_bytes: int):
        self._chunk, self.held, self._hash = chunk_bytes, 0, xxhash.xxh3_64()

    def take(self, source: memoryview, target: memoryview) -> list[str]:
        found, at, there = [], 0, _address(source) == _address(target)
        while at < len(source):
            part = min(self._chunk - self.held, PIECE_BYTES, len(source) - at)
            self._hash.update(source[at : at + part])
            if not there:
                pastcache.copy(target[at : at + part], source[at : at + part])
            at, self.held = at + part, self.held + part
            if self.held == self._chunk:
                found.append(self.digest())
                self._hash.reset()
                self.held = 0
        return found

    def digest(self) -> str:
        return self._hash.hexdigest()


class _NativeState:
    """In C."""

    def __init__(self, chunk_bytes: int, code: _Native):
        self._chunk, self._code, self._held = chunk_bytes, code, ctypes.c_size_t(0)
        self._state = code.create()
        weakref.finalize(self, code.free, self._state)
        code.reset(self._state)

    @property
    def held(self) -> int:
        return self._held.value

    def take(self, source: memoryview, target: memoryview) -> list[str]:
        digests = (ctypes.c_uint64 * (len(source) // self._chunk + 1))()
        complete = self._code.copy_hashed(
            self._code.functions, self._state, ctypes.byref(self._held), self._chunk, PIECE_BYTES, _address(target),
            _address(source), len(source), digests,
        )  # fmt: skip
        return [f"{digest:016x}" for digest in digests[:complete]]

    def digest(self) -> str:
        return f"{self._code.digest(self._state):016x}"


def _address(content: memoryview) -> int:
    return int(np.frombuffer(content, dtype=np.uint8).ctypes.data)


@dataclass(frozen=True)
class _Native:
    """Compiled functions; only the first two take long, and release the interpreter."""

    copy_hashed: Any
    hash_runs: Any
    create: Any
    free: Any
    reset: Any
    digest: Any
    functions: Any


@functools.cache
def native() -> _Native | None:
    """The compiled way; None where there is none, or where it does not agree with the package's own hashes."""
    library = pastcache.compiled()
    try:
        found = None if library is None else _find(library)
    except (OSError, AttributeError, ImportError):
        return None
    return found if found is not None and _agrees(found) else None


def _find(library: ctypes.CDLL) -> _Native:
    """Raises ImportError, OSError or AttributeError where something is not as in the package of today."""
    hashes = ctypes.PyDLL(str(importlib.import_module("xxhash._xxhash").__file__))
    # The plain one is compiled for the oldest processor; builds for x86 have one that looks what this processor can do.
    update = getattr(hashes, "XXH3_64bits_update_dispatch", None) or hashes.XXH3_64bits_update
    reset, digest, create, free = (
        getattr(hashes, f"XXH3_{name}") for name in ("64bits_reset", "64bits_digest", "createState", "freeState")
    )
    create.restype, digest.restype = ctypes.c_void_p, ctypes.c_uint64
    reset.argtypes = digest.argtypes = free.argtypes = (ctypes.c_void_p,)
    run = library.bigtrain_copy_hashed
    sizes, pointer = ctypes.c_size_t, ctypes.c_void_p
    run.argtypes, run.restype = (pointer, pointer, pointer, sizes, sizes, pointer, pointer, sizes, pointer), sizes
    many = library.bigtrain_hash_runs
    many.argtypes, many.restype = (pointer, pointer, sizes, sizes, sizes, pointer, pointer, pointer, pointer), sizes
    functions = (pointer * 3)(*(ctypes.cast(f, pointer).value for f in (reset, update, digest)))
    return _Native(run, many, create, free, reset, digest, functions)


def _agrees(code: _Native) -> bool:
    """Two parts of chunks that they cut, against the package; every byte has arrived."""
    content, chunk = os.urandom(3 * PIECE_BYTES + 77), PIECE_BYTES + 13
    state, copied = _NativeState(chunk, code), bytearray(len(content))
    found, cut = [], PIECE_BYTES + 1000
    for part in (slice(0, cut), slice(cut, None)):
        found += state.take(memoryview(content)[part], memoryview(copied)[part])
    found.append(state.digest())
    expected = [xxhash.xxh3_64_hexdigest(content[i : i + chunk]) for i in range(0, len(content), chunk)]
    whole = memoryview(content)
    ready = _hash_runs_native([[whole[:cut], whole[cut:]]], chunk, code)
    return copied == content and found == expected and ready == [expected]
