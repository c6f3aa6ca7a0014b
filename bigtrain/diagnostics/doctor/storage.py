"""The disk that a run writes to: space, write, cold read, fsync; all of it by doing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bigtrain.diagnostics.doctor.finding import Finding, broken, ok, warning
from bigtrain.plan.machine import show_bytes

PROBE_BYTES = 128 * 2**20
SPACE_BYTES = 2 * 2**30
SLOW_BYTES_S = 100e6
SLOW_FSYNC_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Storage:
    """What was found in `folder`; `error` is of the first thing that failed, the rates are then None.

    Attributes:
        write_bytes_s: with the final fsync; read_bytes_s: after the page cache was told to forget; fsync_s: of 4 KiB, median.
        damaged: what was read back differs from what was written.
    """

    folder: str
    free_bytes: int
    error: str | None = None
    write_bytes_s: float | None = None
    read_bytes_s: float | None = None
    fsync_s: float | None = None
    damaged: bool = False


def measure_storage(folder: str | Path, size: int = PROBE_BYTES, speed: bool = True) -> Storage:
    """Write, read cold and sync a file of `size` bytes in `folder` (a parent of it, if it does not exist yet); removes it."""
    place = Path(folder).absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    path = ""
    try:
        handle, path = tempfile.mkstemp(prefix=".bigtrain-doctor-", dir=place)
        with os.fdopen(handle, "r+b", buffering=0) as file:
            if not speed:
                file.write(bytes(4096))
                os.fsync(file.fileno())
                return Storage(folder=str(place), free_bytes=free)
            write, read, damaged = _write_and_read(file.fileno(), size)
            return Storage(
                folder=str(place), free_bytes=free, write_bytes_s=write, read_bytes_s=read, damaged=damaged,
                fsync_s=_fsync(file.fileno()),
            )  # fmt: skip
    except OSError as error:
        return Storage(folder=str(place), free_bytes=free, error=str(error.strerror))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _write_and_read(handle: int, size: int) -> tuple[float, float, bool]:
    block = os.urandom(2**22)  # random, so that no file system compresses it away
    begun = time.perf_counter()
    for _ in range(size // len(block)):
        _write_all(handle, block)
    os.fsync(handle)
    write_s = time.perf_counter() - begun
    with contextlib.suppress(AttributeError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    want, damaged = zlib.crc32(block), False
    os.lseek(handle, 0, os.SEEK_SET)
    read_s = 0.0
    for _ in range(size // len(block)):
        begun = time.perf_counter()
        data = os.read(handle, len(block))
        read_s += time.perf_counter() - begun
        damaged = damaged or zlib.crc32(data) != want
    return size / write_s, size / read_s, damaged


def _write_all(handle: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:  # a disk that fills up first writes a part, then raises
        rest = rest[os.write(handle, rest) :]


def _fsync(handle: int) -> float:
    spent = []
    for _ in range(5):
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, os.urandom(4096))
        begun = time.perf_counter()
        os.fsync(handle)
        spent.append(time.perf_counter() - begun)
    return median(spent)


# ---------------------------------------------------------------- judging


def check_space(storage: Storage) -> Finding:
    """There is space, and a file can be written."""
    name, needed = "disk space", f"{show_bytes(SPACE_BYTES)}, and twice a checkpoint (16 bytes a parameter)"
    measured = f"{storage.folder}: {show_bytes(storage.free_bytes)} free"
    remedy = f"free some space (du -xh {storage.folder} | sort -h | tail), or choose another --output_dir (doctor: --dir)"
    if storage.error:
        return broken(name, f"writing fails: {storage.error}", measured, needed, remedy)
    if storage.free_bytes < SPACE_BYTES:
        return broken(name, "nearly full: a checkpoint will not fit", measured, needed, remedy)
    return ok(name, "enough to start", measured, needed)


def check_disk(storage: Storage) -> list[Finding]:
    """Speed of writing, cold reading and fsync."""
    if storage.write_bytes_s is None or storage.read_bytes_s is None or storage.fsync_s is None:
        return []
    local = "use a local disk for --output_dir and for the weights, or a faster share"
    if storage.damaged:
        remedy = "do not use this disk; dmesg may say what is wrong"
        return [broken("disk", "what is read is not what was written", storage.folder, "the same bytes", remedy)]
    out = []
    for name, rate in (("disk write", storage.write_bytes_s), ("disk cold read", storage.read_bytes_s)):
        say = f"{rate / 1e9:.2f} GB/s", f"{SLOW_BYTES_S / 1e9:.1f} GB/s"
        out.append(warning(name, "slow", *say, local) if rate < SLOW_BYTES_S else ok(name, "measured", *say))
    say = f"{1e3 * storage.fsync_s:.1f} ms", f"{1e3 * SLOW_FSYNC_S:.0f} ms"
    slow = storage.fsync_s > SLOW_FSYNC_S
    return [
        *out,
        warning("disk fsync", "slow: every checkpoint waits", *say, local) if slow else ok("disk fsync", "measured", *say),
    ]
