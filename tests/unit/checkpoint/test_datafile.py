"""Files past the page cache: what is written is what is read, at any size, offset and file system."""

import os
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from bigtrain.checkpoint import datafile, files, hashing, snapshot
from bigtrain.checkpoint.datafile import BLOCK_BYTES, DataFile, DataSource, DiskThread, aligned_buffer, buffers, take_hashed
from bigtrain.checkpoint.files import Disk
from bigtrain.checkpoint.hashing import ChunkHashes
from bigtrain.checkpoint.snapshot import BLOCK_BYTES as HOST_BLOCK_BYTES
from bigtrain.checkpoint.snapshot import HostMemory, copy_host
from bigtrain.errors import CheckpointError
from bigtrain.plan.room import Room
from bigtrain.weights import lock

CHUNK = 1 << 20
FOLDERS = ["disk", "memory"] if Path("/dev/shm").is_dir() else ["disk"]


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path):
    """A disk, and a file system without direct I/O on older kernels."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
            yield Path(made)


@pytest.mark.parametrize(
    "sizes", [[1], [4096], [5, 0, 70_001, 3], [BLOCK_BYTES], [BLOCK_BYTES + 1, CHUNK * 3 + 77], [3 * BLOCK_BYTES + 4095]]
)
@pytest.mark.parametrize("compiled", [True, False])
def test_pieces_with_gaps_arrive_and_are_hashed(folder, sizes, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(hashing, "native", lambda: None)
    chance = np.random.default_rng(len(sizes))
    whole, hashes, position = bytearray(), [], 0
    file = DataFile(Disk(), folder / "x", DiskThread())
    for size in sizes:
        content = chance.bytes(size)
        whole += b"\0" * (position - len(whole)) + content
        hashes.append((content, ChunkHashes(CHUNK)))
        file.write(memoryview(content), position, hashes[-1][1])
        position = files.aligned(position + size)
    file.close()
    assert (folder / "x").read_bytes() == whole
    for content, told in hashes:
        assert told.end() == [xxhash.xxh3_64_hexdigest(content[i : i + CHUNK]) for i in range(0, len(content), CHUNK)]


@pytest.mark.parametrize("size", [1, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 70_001, 4 << 20])
@pytest.mark.parametrize("short", [False, True])
def test_what_lies_ready_is_written_from_there(folder, size, short, monkeypatch):
    """In requests of two blocks; a disk that takes less than it is given is asked again for the rest."""
    block, put = 1 << 20, os.pwritev
    monkeypatch.setattr(datafile, "READY_BYTES", 2 * block)
    if short:
        monkeypatch.setattr(
            os, "pwritev", lambda handle, parts, at: put(handle, [parts[0][: max(4096, len(parts[0]) // 8192 * 4096)]], at)
        )
    content = np.random.default_rng(size).bytes(size)
    blocks = [memory for _ in range(2) for memory in buffers(block)][:4]
    for i, memory in enumerate(blocks):
        part = content[i * block : (i + 1) * block]
        memory[:] = part + bytes(block - len(part))
    file = DataFile(Disk(), folder / "x", DiskThread())
    file.write_ready(blocks[: -(-size // block)], size)
    assert len(list(file.settled())) == -(-size // (2 * block))
    file.close()
    assert (folder / "x").read_bytes() == content


@pytest.mark.parametrize("direct", [False, True])
def test_any_range_is_read(folder, direct):
    content = np.random.default_rng(1).bytes(300_001)
    (folder / "x").write_bytes(content)
    source = DataSource(folder / "x", len(content))
    if direct:
        source.close()
        source._handle = datafile.open_direct(folder / "x", 0)
    buffer, chance = memoryview(aligned_buffer()), random.Random(2)
    for _ in range(50):
        begin = chance.randrange(len(content))
        end = chance.choice([len(content), chance.randrange(begin, len(content)) + 1])
        assert source.read_block(buffer, begin, end) == content[begin:end]
        into = memoryview(bytearray(end - begin))
        if not direct:
            assert (
                source.read_hashed(into, begin) == xxhash.xxh3_64_hexdigest(content[begin:end]) and into == content[begin:end]
            )
    with pytest.raises(CheckpointError, match="too early"):
        source.read_block(buffer, 299_990, 300_100)
    source.close()


def test_copies_share_blocks_and_blocks_are_used_again():
    host = HostMemory(pinned=False)
    tensors = [torch.randn(n) for n in (3, 1_000_001, 17, HOST_BLOCK_BYTES // 4, 5)]
    copies = []
    for tensor in tensors:
        copies.append(host.take(tensor))
        copy_host(tensor, copies[-1].tensor)
    assert all(torch.equal(c.tensor, t) for c, t in zip(copies, tensors)) and host.nbytes == 3 * HOST_BLOCK_BYTES
    for copy in copies:
        copy.give_back()
    again = [host.take(tensor) for tensor in tensors]
    assert host.nbytes == 3 * HOST_BLOCK_BYTES and {c.block for c in again} <= {0, 1, 2}
    host.settle()
    assert host.nbytes == 3 * HOST_BLOCK_BYTES  # in use: kept whatever the machine has


def test_no_block_is_made_where_memory_is_short(monkeypatch):
    host, tensor = HostMemory(pinned=False), torch.zeros(HOST_BLOCK_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(snapshot, "room", lambda: Room(99, 100, "here"))
    first = host.take(tensor)
    assert first is not None and host.take(tensor) is None  # one block is too little to matter
    host.reserve(10 * HOST_BLOCK_BYTES, threads=2)
    assert host.nbytes == HOST_BLOCK_BYTES
    assert host.take(tensor, even_if_short=True) is not None and host.nbytes == 2 * HOST_BLOCK_BYTES
    first.give_back()
    assert host.take(tensor).block == first.block


@pytest.mark.parametrize("ranks_here", [1, 2])
def test_threads_that_make_blocks_together_stop_where_one_would(monkeypatch, ranks_here):
    """Each looked before any other had made its own: 8 ranks with 8 threads went 4 GiB beyond, where the watch ends a run that grows."""
    made = []

    def slow(_: HostMemory) -> torch.Tensor:
        time.sleep(0.05)
        made.append(HOST_BLOCK_BYTES)
        return torch.empty(0, dtype=torch.uint8)

    limit = 100 * HOST_BLOCK_BYTES
    monkeypatch.setattr(HostMemory, "_new_block", slow)
    monkeypatch.setattr(snapshot, "room", lambda: Room(86 * HOST_BLOCK_BYTES + sum(made), limit, "here"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    host = HostMemory(pinned=False)
    host.reserve(50 * HOST_BLOCK_BYTES, threads=8)
    assert len(made) == 4 // ranks_here  # the other ranks of the host make as many


def test_reserved_blocks_are_the_ones_taken():
    host, tensor = HostMemory(pinned=False), torch.zeros(HOST_BLOCK_BYTES, dtype=torch.uint8)
    host.reserve(2 * HOST_BLOCK_BYTES + 1, threads=2)
    assert host.nbytes == 3 * HOST_BLOCK_BYTES
    assert sorted(host.take(tensor).block for _ in range(3)) == [0, 1, 2]
    host.reserve(HOST_BLOCK_BYTES, threads=2)
    assert host.nbytes == 4 * HOST_BLOCK_BYTES


def test_take_hashed_copies_or_not():
    content = np.random.default_rng(3).bytes(700_000)
    into = memoryview(bytearray(len(content)))
    assert take_hashed(memoryview(content), into) == take_hashed(memoryview(content), None) == xxhash.xxh3_64_hexdigest(content)
    assert into == content


def test_a_folder_belongs_to_one_writer(tmp_path):
    held = files.claim(tmp_path)
    with pytest.raises(CheckpointError, match="another run is writing"):
        files.claim(tmp_path)
    lock.release(held)
    lock.release(files.claim(tmp_path))
