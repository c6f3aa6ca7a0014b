"""Saving what lies on a GPU: not a byte of GPU memory, a copy beside the kernels, and the bits of the moment."""

import threading

import pytest
import torch

from bigtrain.checkpoint import store
from bigtrain.checkpoint.load import load_slices
from bigtrain.checkpoint.save import Saver
from bigtrain.checkpoint.slices import LocalSlice
from bigtrain.checkpoint.snapshot import BLOCK_BYTES
from bigtrain.plan.room import Room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DTYPES = {"weight": torch.bfloat16, "low": torch.int16, "exp_avg": torch.uint8, "master": torch.float32}
SIZES = (1, 4097, 40_000_003)


def _slices(device: torch.device, host: tuple[str, ...] = ()) -> list[LocalSlice]:
    """Random bits; kinds in `host` lie in host memory, as offloaded state does."""
    out = []
    for kind, dtype in DTYPES.items():
        for i, n in enumerate(SIZES):
            bits = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype)
            tensor = bits if kind in host else bits.to(device)
            out.append(LocalSlice(param=f"p{i}", kind=kind, shape=(n,), start=0, tensor=tensor))
    return out


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).cpu()


@pytest.mark.parametrize("host", [(), ("low", "exp_avg")], ids=["gpu", "gpu and host"])
@pytest.mark.parametrize("last", [False, True], ids=["first card", "last card"])
def test_a_save_takes_no_gpu_memory_and_the_state_of_its_moment(tmp_path, host, last):
    """Also on a card that is not a new thread's first; the state is changed as soon as the update may be done."""
    device = torch.device("cuda", torch.cuda.device_count() - 1 if last else 0)
    with torch.cuda.device(device):
        slices = _slices(device, host)
        expected = [_bits(s.tensor).clone() for s in slices]
        saver = Saver(tmp_path)
        for step in (1, 2):
            for s, bits in zip(slices, expected):
                s.tensor.view(torch.uint8).copy_(bits)
            torch.cuda.synchronize()
            before = [torch.cuda.memory_allocated(d) for d in range(torch.cuda.device_count())]
            torch.cuda.reset_peak_memory_stats(device)
            saver.start(step, slices, run={}, rank_state={}, layout={})
            saver.before_update()
            for s in slices:
                s.tensor.zero_()
            saver.wait()
            assert [torch.cuda.memory_allocated(d) for d in range(torch.cuda.device_count())] == before
            assert torch.cuda.max_memory_allocated(device) == before[device.index]
            held = saver.copier.held_bytes
            load_slices(store.open_checkpoint(tmp_path / f"checkpoint-{step}"), slices)
            assert all(torch.equal(_bits(s.tensor), bits) for s, bits in zip(slices, expected))
        assert saver.copier.held_bytes == held  # kept, and enough


@pytest.mark.parametrize("host", [(), ("low", "exp_avg")], ids=["gpu", "gpu and host"])
def test_what_the_host_has_no_room_for_is_written_from_the_card(tmp_path, host, monkeypatch):
    """The update waits for it; a few blocks of 64 MiB are enough, and no GPU memory is taken."""
    monkeypatch.setattr("bigtrain.checkpoint.snapshot.room", lambda: Room(95, 100, "here"))
    slices = _slices(torch.device("cuda"), host)
    expected = [_bits(s.tensor).clone() for s in slices]
    saver, before = Saver(tmp_path), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    saver.start(1, slices, run={}, rank_state={}, layout={})
    saver.before_update()
    for s in slices:
        s.tensor.zero_()
    saver.wait()
    assert torch.cuda.max_memory_allocated() == before
    assert saver.copier.held_bytes <= 5 * BLOCK_BYTES < sum(s.tensor.nbytes for s in slices)
    load_slices(store.open_checkpoint(tmp_path / "checkpoint-1"), slices)
    assert all(torch.equal(_bits(s.tensor), bits) for s, bits in zip(slices, expected))


@pytest.mark.parametrize("host", [(), ("low", "exp_avg")], ids=["gpu", "gpu and host"])
def test_host_memory_made_before_the_first_save_is_what_it_needs(tmp_path, host):
    slices = _slices(torch.device("cuda"), host)
    expected = [_bits(s.tensor).clone() for s in slices]
    saver, before = Saver(tmp_path), torch.cuda.memory_allocated()
    saver.prepare(slices)
    next(t for t in threading.enumerate() if t.name == "save-prepare").join()
    made, on_card = saver.copier.held_bytes, sum(s.tensor.nbytes for s in slices if s.tensor.is_cuda)
    assert on_card <= made < on_card + 2 * BLOCK_BYTES and torch.cuda.memory_allocated() == before
    saver.start(1, slices, run={}, rank_state={}, layout={})
    saver.before_update()
    for s in slices:
        s.tensor.zero_()
    saver.wait()
    if not host:  # else the update waited for what is copied on the host too, and pieces leave gaps in blocks
        assert saver.copier.held_bytes == made
    load_slices(store.open_checkpoint(tmp_path / "checkpoint-1"), slices)
    assert all(torch.equal(_bits(s.tensor), bits) for s, bits in zip(slices, expected))
