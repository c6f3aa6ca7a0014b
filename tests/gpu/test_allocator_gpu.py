"""The replay of the caching allocator against the allocator itself, byte for byte, in a process of its own."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from bigtrain.plan.allocator import replay
from bigtrain.plan.tape import ALLOC, EMPTY_CACHE, FREE, RETURN, Tape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = [512, 5120, 700 * 1024, 2**20, 2**20 + 512, 3 * 10**6, 9 * 2**20, 10**7, 2 * 10**7, 45 * 10**6, 130 * 2**20]


def wild(seed, count=200):
    """Requests and frees on two streams; some are lent to the other stream, some caches emptied."""
    rng, tape, held, lent = random.Random(seed), Tape(), [], []
    for i in range(count):
        chance = rng.random()
        if held and chance < 0.08:
            lent.append(held.pop(rng.randrange(len(held))))
            tape.lend(lent[-1])
        elif lent and chance < 0.14:
            tape.returned(*lent)
            lent = []
        elif held and chance < 0.45:
            tape.drop(held.pop(rng.randrange(len(held))))
        elif chance < 0.47:
            tape.empty_cache()
        else:
            tape.hold(i, rng.choice(SIZES) * rng.randint(1, 3), "x", rng.randint(0, 1))
            held.append(i)
    return tape


def on_the_card(tape, limit_bytes):
    """Reserved bytes after each event; None from the first request on that the limit does not allow."""
    before = torch.cuda.memory_reserved()
    assert before == 0, "the process has used its card already"
    if limit_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((limit_bytes + 2**19) / total)  # sizes are whole MiB
    streams, found, tensors = [torch.cuda.Stream(), torch.cuda.Stream()], [], {}
    for kind, slot, size, _ in tape.events:
        if kind == ALLOC:
            with torch.cuda.stream(streams[tape.streams[slot]]):
                try:
                    tensors[slot] = torch.empty(size, dtype=torch.uint8, device="cuda")
                except torch.cuda.OutOfMemoryError:
                    return found
        elif kind == FREE and slot in tape.late:
            other = streams[1 - tape.streams[slot]]
            with torch.cuda.stream(other):
                torch.cuda._sleep(2**31)  # a second: until it is waited for, what the stream uses is not free
            tensors[slot].record_stream(other)
            del tensors[slot]
        elif kind == FREE:
            del tensors[slot]
        elif kind == RETURN:
            torch.cuda.synchronize()
        elif kind == EMPTY_CACHE:
            torch.cuda.empty_cache()
        found.append(torch.cuda.memory_reserved())
    return found


def in_a_process(seed, limit_bytes, setting):
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting}
    env.pop("PYTORCH_ALLOC_CONF", None)
    code = (
        "import json; from tests.gpu.test_allocator_gpu import wild, on_the_card\n"
        f"print(json.dumps(on_the_card(wild({seed}), {limit_bytes})))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("expandable", [True, False])
def test_reserved_after_every_request_and_free(seed, expandable):
    setting = f"expandable_segments:{expandable}"
    assert in_a_process(seed, None, setting) == list(replay(wild(seed), expandable=expandable).after)


@pytest.mark.parametrize("share", [0.7, 0.85])
def test_reserved_at_a_limit(share):
    tape = wild(7)
    limit = int(share * replay(tape).peak_bytes / 2**20) * 2**20
    said, found = replay(tape, limit), in_a_process(7, limit, "expandable_segments:True")
    assert found == list(said.after[: len(found)])
    assert (len(found) < len(said.after)) == bool(said.short_bytes)
