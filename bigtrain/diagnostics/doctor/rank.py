"""One rank of the communication test: `python -m bigtrain.diagnostics.doctor.rank FOLDER LIMIT_S`, with a launcher's variables.

It meets the others, checks the values of three collectives, trains a tiny model for real at ZeRO stage 3, and notes each stage
in FOLDER/rank.<r>.json before it begins, so that a process that hangs or dies has said where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigtrain.stopping import end_process

STAGES = (
    "start",
    "meet",
    "placement",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "bandwidth",
    "ZeRO-3 step",
    "leave",
    "done",
)


class Story:
    """What this rank tells the doctor, kept on disk."""

    def __init__(self, folder: str, rank: int):
        self._path = Path(folder, f"rank.{rank}.json")
        self._told: dict[str, Any] = {"rank": rank, "stage": "start", "error": None}

    def tell(self, **values: Any) -> None:
        """Add `values` and write it all, whole or not at all."""
        self._told |= values
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps(self._told))
        os.replace(draft, self._path)


def main(argv: list[str] | None = None) -> int:
    """Run the stages; 0 if all of them did what they should."""
    folder, limit = (sys.argv[1:] if argv is None else argv)[:2]
    rank = int(os.environ["RANK"])
    story = Story(folder, rank)
    with open(Path(folder, f"stack.{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        story.tell()
        try:
            _stages(story, float(limit), stack)
        except Exception as error:
            from bigtrain.builds import first_cause

            traceback.print_exc(file=stack)
            story.tell(error=first_cause(error))
            return 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    return 0


def _stages(story: Story, limit_s: float, stack: Any) -> None:
    import torch.distributed as dist

    from bigtrain import ranks, zero
    from bigtrain.diagnostics.doctor.collectives import COLLECTIVES
    from bigtrain.hosts.placement import refuse_shared_cards, this_place

    device, place = ranks.device(), this_place()
    story.tell(stage="meet", places=[asdict(place)], backend="nccl" if device.type == "cuda" else "gloo")
    faulthandler.dump_traceback_later(0.9 * limit_s, file=stack)
    zero.init_distributed(timeout_s=limit_s, meet_s=limit_s)
    places = ranks.all_gather_object(place)  # over gloo, before NCCL would fail on a shared card
    story.tell(stage="placement", places=[asdict(p) for p in places])
    refuse_shared_cards(places)
    for name, collective in COLLECTIVES.items():
        story.tell(stage=name)
        collective(limit_s)
    story.tell(stage="bandwidth")
    story.tell(link_bytes_s=_bandwidth(device), stage="ZeRO-3 step")
    _train(device)
    story.tell(stage="leave")
    ranks.barrier("the end of the doctor's test", limit_s)
    story.tell(stage="done")
    with contextlib.suppress(Exception):  # everything has been tested; what closing says is of no interest
        dist.destroy_process_group()


def _bandwidth(device: Any) -> float | None:
    """Bytes in a second over a link of the ring: an all-reduce of B bytes moves 2 (N - 1) / N B over each."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    if world == 1:
        return None
    cuda = device.type == "cuda"
    x = torch.ones((64 if cuda else 2) * 2**20, device=device)
    spent = []
    for _ in range(4):
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        dist.all_reduce(x)
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - begun)
    return 2 * (world - 1) / world * x.nbytes / min(spent[1:])


def _train(device: Any) -> None:
    """Four bf16 ZeRO-3 steps of a small network: the loss falls, and all ranks end with the same weights."""
    import torch
    import torch.distributed as dist

    from bigtrain import zero
    from bigtrain.diagnostics.doctor.collectives import expect

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    sizes = {k: 10_000 for k in ("reduce_bucket_size", "stage3_prefetch_bucket_size")}
    config = {
        "train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **sizes},
    }  # fmt: skip
    engine = zero.initialize(model, config, torch.optim.AdamW(model.parameters(), lr=1e-2), list(model.parameters()))
    torch.manual_seed(100 + dist.get_rank())
    x = torch.randn(8, 64, device=device, dtype=torch.bfloat16)
    losses = []
    for _ in range(4):
        loss = (engine(x).float() - 1.0).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss does not fall: {losses}")
    with zero.gathered(list(engine.module.parameters())):
        flat = torch.cat([p.detach().flatten().float() for p in engine.module.parameters()])
    whole = torch.empty(dist.get_world_size() * flat.numel(), device=device)
    dist.all_gather_into_tensor(whole, flat)
    expect(whole, flat.repeat(dist.get_world_size()))


if __name__ == "__main__":
    end_process(main())
