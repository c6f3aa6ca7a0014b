"""Hashes taken on the way are those of the `xxhash` package, whoever computes them."""

import os
import random
import shutil

import pytest
import xxhash

from bigtrain.checkpoint import hashing
from bigtrain.checkpoint.hashing import PIECE_BYTES, ChunkHashes
from bigtrain.memory import pastcache


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(hashing, "native", lambda: None)
    return request.param


@pytest.mark.parametrize("chunk", [1, 77, 4096, PIECE_BYTES, PIECE_BYTES + 1, 1 << 20])
def test_in_any_parts(way, chunk):
    content = os.urandom(min(300 * chunk, 3 << 20) + 5)
    copied, hashes, at, chance = bytearray(len(content)), ChunkHashes(chunk), 0, random.Random(chunk)
    while at < len(content):
        end = min(len(content), at + chance.choice([0, 1, 63, chunk, 2 * chunk + 1, len(content)]))
        hashes.take(memoryview(content)[at:end], memoryview(copied)[at:end])
        at = end
    assert copied == content
    assert hashes.end() == [xxhash.xxh3_64_hexdigest(content[i : i + chunk]) for i in range(0, len(content), chunk)]


@pytest.mark.parametrize("chunk", [1000, PIECE_BYTES + 1])
def test_runs_that_lie_ready(way, chunk):
    """Of one part, of many, ending with a whole chunk, and empty ones; nothing is written."""
    content = bytearray(os.urandom(4 * PIECE_BYTES + 99))
    before, view = bytes(content), memoryview(content)
    cuts = [[(0, 7), (7, 7), (7, 3 * chunk)], [], [(5, 5)], [(100, 100 + 2 * chunk)], [(3, 4), (50, len(content))]]
    found = hashing.hash_runs([[view[a:b] for a, b in run] for run in cuts], chunk)
    runs = [b"".join(before[a:b] for a, b in run) for run in cuts]
    assert found == [[xxhash.xxh3_64_hexdigest(run[i : i + chunk]) for i in range(0, len(run), chunk)] for run in runs]
    assert content == before
    assert hashing.hash_runs([], chunk) == []


def test_nothing_and_unequal_lengths(way):
    hashes = ChunkHashes(8)
    hashes.take(memoryview(b""), memoryview(bytearray()))
    with pytest.raises(ValueError, match="4 bytes into 5"):
        hashes.take(memoryview(b"1234"), memoryview(bytearray(5)))
    assert hashes.end() == []


def test_it_is_compiled_where_it_can_be():
    if pastcache.platform.machine() != "x86_64" or not shutil.which("cc"):
        pytest.skip("no C compiler for x86-64")
    assert hashing.native() is not None


@pytest.mark.parametrize("why", ["no compiler", "functions not exported", "another hash"])
def test_without_it_python_does_it(why, monkeypatch):
    if why == "no compiler":
        monkeypatch.setattr(pastcache, "compiled", lambda: None)
    elif why == "functions not exported":
        monkeypatch.setattr(hashing, "_find", lambda library: library.no_such_function)
    else:
        monkeypatch.setattr(hashing.xxhash, "xxh3_64_hexdigest", lambda content: "0" * 16)
    hashing.native.cache_clear()
    assert hashing.native() is None
    hashing.native.cache_clear()
