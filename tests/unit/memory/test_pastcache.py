"""Copies past the cache are copies."""

import shutil
import subprocess

import numpy as np
import pytest

from bigtrain.memory import pastcache


@pytest.fixture(autouse=True)
def fresh():
    pastcache.compiled.cache_clear()
    yield
    pastcache.compiled.cache_clear()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, (64 << 10) - 1, 64 << 10, (64 << 10) + 65, (1 << 20) + 4097])
@pytest.mark.parametrize("shift", [0, 1, 16])
def test_every_byte_and_no_other(size, shift):
    source = np.random.default_rng(size).integers(0, 256, size + 2 * shift, dtype=np.uint8)
    target = np.full(size + 64, 7, dtype=np.uint8)
    pastcache.copy(memoryview(target)[shift : shift + size], memoryview(source)[2 * shift :])
    assert (target[shift : shift + size] == source[2 * shift :]).all()
    assert (target[:shift] == 7).all() and (target[shift + size :] == 7).all()


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError):
        pastcache.copy(memoryview(bytearray(1 << 20)), memoryview(bytearray((1 << 20) - 1)))


def test_it_is_compiled_where_there_is_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if pastcache.platform.machine() != "x86_64" or not shutil.which("cc"):
        pytest.skip("no C compiler for x86-64")
    assert pastcache.compiled() is not None
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize("why", ["no compiler", "it fails", "folder not writable", "damaged file", "copies wrong"])
def test_without_it_memmove_copies(why, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if why == "no compiler":
        monkeypatch.setenv("CC", str(tmp_path / "absent"))
    elif why == "it fails":
        monkeypatch.setenv("CC", "false")
    elif why == "folder not writable":
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    elif why == "damaged file":
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"no library")
        monkeypatch.setattr(pastcache, "_library", lambda: broken)
    else:
        monkeypatch.setattr(pastcache, "_copies_right", lambda run: False)
    assert pastcache.compiled() is None
    source, target = np.arange(1 << 17, dtype=np.uint32), np.zeros(1 << 17, dtype=np.uint32)
    pastcache.copy(memoryview(target).cast("B"), memoryview(source).cast("B"))
    assert (source == target).all()


def test_a_compiler_that_hangs_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def late(*args, **kwargs):
        raise subprocess.TimeoutExpired("cc", kwargs["timeout"])

    monkeypatch.setattr(pastcache.subprocess, "run", late)
    assert pastcache.compiled() is None
