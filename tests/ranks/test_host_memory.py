"""Host memory that is too small, as a whole run meets it: refused before building, or stopped before the kernel kills."""

import ctypes
import json
import os
import platform
import threading
import time
from unittest import mock

import pytest
import torch

from bigtrain import ranks
from bigtrain.bench import inputs
from bigtrain.errors import DoesNotFitError
from bigtrain.run import capacity
from tests import ROOT, python_path
from tests.ranks import scripts

GIB = 2**30


def container(root, limit, used):
    """A faked tree: a machine of 64 GiB, and a container on it with `limit` bytes of which `used` are in use."""
    files = {
        "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": limit,
        "sys/fs/cgroup/job/memory.current": used,
        "sys/fs/cgroup/job/memory.stat": "anon 0\ninactive_file 0\nactive_file 0\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def _per_host():
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(8 - 4 * ranks.rank())):
        return capacity.ranks_per_host()


def test_hosts_with_different_numbers_of_ranks_make_one_plan(rank_pool):
    assert rank_pool(2).run(_per_host) == [8, 8]


def _mapped_mib():
    """What malloc has mapped by itself more for a block of 1 MiB, after one of 16 MiB was freed: 1, or 0 out of the heap."""

    class Info(ctypes.Structure):  # malloc.h: struct mallinfo2, ten sizes
        _fields_ = (("sizes", ctypes.c_size_t * 10),)

    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Info

    def mapped():
        return mallinfo().sizes[4]

    torch.ones(4 << 20)
    before = mapped()
    block = torch.ones(1 << 18)
    more = mapped() - before
    del block
    return more >> 20, mapped() - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_a_rank_on_a_cpu_gives_back_what_it_frees(rank_pool):
    assert rank_pool(1).run(_mapped_mib) == [(1, 0)]


def train(folder, root, steps, data=None):
    """Two ranks of launch/train.py that believe in the faked tree."""
    rows = inputs.make_rows(folder, vocab=512, seq_len=32, at_least=4)
    words = [
        ROOT / "launch/train.py", "--ds_config", str(ROOT / "ds_configs/zero2_offload.json"),
        "--model_name_or_path", "preset:llama-tiny", "--tokenizer_name_or_path", str(inputs.make_tokenizer(folder)),
        "--train_data", str(data or rows / "rows.parquet"), "--packing", "none", "--seq_len", "32", "--max_steps", str(steps),
        "--per_device_train_batch_size", "1", "--num_train_epochs", "1000", "--report_to", "none", "--disable_tqdm",
        "--no_export", "--output_dir", str(folder / "out"),
    ]  # fmt: skip
    env = {"BIGTRAIN_HOST_ROOT": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    both = scripts.Ranks(words, {**os.environ, **env}, folder / "said", cwd=folder, apart=True)
    both.wait(250)
    return [rank.poll() for rank in both.ranks], [rank.said() for rank in both.ranks]


def test_a_host_that_cannot_hold_the_run_is_refused_before_the_data_is_read(tmp_path):
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "a row"}\n' * 200 + '{"text": "no end\n')  # reading all of it would be another error
    codes, said = train(tmp_path, container(tmp_path / "host", GIB // 2, GIB // 8), steps=2, data=wrong)
    assert codes == [DoesNotFitError.exit_code] * 2, said
    assert "host: needs" in said[0] and "of 0.50 GiB with a margin of 5%: DOES NOT FIT" in said[0]
    assert "Nothing was built, no data was read. Nothing near fits: shorten --seq_len, take more ranks" in said[0]
    assert not (tmp_path / "out" / "run.json").exists()


def test_the_run_stops_with_a_table_before_the_host_is_full(tmp_path):
    root = container(tmp_path / "host", 8 * GIB, GIB)
    log = tmp_path / "said.0"
    current, metrics = root / "sys/fs/cgroup/job/memory.current", tmp_path / "out" / "metrics.jsonl"

    def told():
        return metrics.read_text() if metrics.exists() else ""

    def fill():
        # Slowly, as a leak would: one jump to the warning's mark would be answered at once.
        for used, ready in ((7.3, lambda: told().count("\n") >= 1), (7.5, lambda: time.sleep(1) is None),
                            (7.9, lambda: '"host_memory_warning": true' in told() and "nearest that fit" in log.read_text())):  # fmt: skip
            while not ready():
                time.sleep(0.1)
            current.write_text(str(int(used * GIB)))

    filler = threading.Thread(target=fill, daemon=True)
    filler.start()
    codes, said = train(tmp_path, root, steps=100_000)
    filler.join(10)
    assert codes == [DoesNotFitError.exit_code] * 2, said
    assert "7.90 GiB of 8.00 GiB (container limit) are in use, 99%" in said[0]
    table = said[0][said[0].index("stops in step") :]
    assert all(word in table for word in ("planned", "held", "weights", "gradients", "optimizer states", "together"))
    assert table.count("ZeRO-") == 3, table  # the nearest that fit, found while there was room
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert rows[0]["host_memory_used"] == pytest.approx(1 / 8) and not rows[0]["host_memory_warning"]
    assert rows[-1]["host_memory_warning"]
    outcome = json.loads((tmp_path / "out" / "run.json").read_text())["outcome"]
    # The rank that ends first may be seen as lost by the other's training thread before that one ends for the same reason.
    assert outcome.startswith("stopped: host memory nearly full") or "rank 1 ended" in outcome, outcome
