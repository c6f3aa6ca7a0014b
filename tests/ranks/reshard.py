"""Saved by any number of ranks at any stage, loaded by any other: `python -m tests.ranks.reshard WORK --optimizer adamw --table F`.

For every optimizer: 1 to 4 ranks x ZeRO stage 0 to 3 x optimizer offload on and off, as far as the optimizer allows it, save after
three steps; each of them loads what every one saved into a running engine whose state was overwritten before. Masters, weights and
moments must be equal bit for bit. Moments of 8 bits belong to blocks of 256 elements of a flat partition: where the partitions
are cut alike, codes and scales come back as they were; elsewhere the moments must be, bit for bit, the saved values encoded anew in
this run's blocks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from bigtrain import ranks
from bigtrain.checkpoint import live
from bigtrain.checkpoint.blocks import MOMENTS
from bigtrain.diagnostics.pages import put_table
from bigtrain.optim import OPTIMIZERS, arithmetic
from bigtrain.optim.table import BLOCK_ELEMS
from tests.ranks.test_checkpoint_engine import _engine, _state, _step

NAMES = ("adamw", "adamw_8bit", "muon", "adamw_split", "adamw_split_bf16", "adamw_split_8bit")
EXACT = ("master", "weight", "low", "buffer")


class Run(NamedTuple):
    """A way to run: ranks, ZeRO stage, optimizer offload."""

    world: int
    stage: int
    offload: bool

    def __str__(self) -> str:
        return f"{self.world} ranks, stage {self.stage}" + (", offload" if self.offload else "")


def runs(optimizer: str, worlds=(1, 2, 3, 4)) -> list[Run]:
    """All that this optimizer allows."""
    row = OPTIMIZERS[optimizer]
    every = itertools.product(worlds, row.stages, (False, True))
    return [Run(w, s, o) for w, s, o in every if not o or s > 0]


def save(root: str, optimizer: str, stage: int, offload: bool) -> None:
    """Three steps, a checkpoint, and beside it what it holds."""
    engine = _engine(stage, optimizer, offload=offload)
    for step in range(3):
        _step(engine, step)
    engine.save_checkpoint(root)
    hashes, moments = _state(engine), decoded(engine)
    if engine.rank == 0:
        torch.save((hashes, moments), f"{root}/reference.pt")
    engine.close()


def decoded(engine) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, parameter) -> an 8-bit moment as fp32, put together from all ranks; {} for other optimizers."""
    parts = []
    for flat, kind in eight_bit(engine):
        values = values_of(flat, kind)
        parts += [((kind, name), start, values[at : at + count].clone()) for name, _, start, at, count in flat.pieces]
    merged: dict = defaultdict(dict)
    for told in ranks.all_gather_object(parts):
        for key, start, values in told:
            merged[key][start] = values
    return {key: torch.cat([held[start] for start in sorted(held)]) for key, held in merged.items()}


def eight_bit(engine):
    """(flat tensor, kind) of every 8-bit moment."""
    for flat in live.flat_tensors(engine):
        yield from ((flat, kind) for kind in MOMENTS if kind in flat.state)


def values_of(flat, kind: str) -> torch.Tensor:
    """A moment of one flat tensor as fp32."""
    held = flat.state[kind].view(-1)
    scale_kind, signed = MOMENTS[kind]
    return arithmetic.decode(held, flat.state[scale_kind], signed) if held.dtype == torch.uint8 else held.float()


def load(roots: list[str], optimizer: str, stage: int, offload: bool) -> list[tuple[str, list[str]]]:
    """Load each checkpoint into one engine; ("equal" or "re-encoded", what is wrong) for each."""
    engine = _engine(stage, optimizer, offload=offload, seed=99)
    _step(engine, 0)
    answers = []
    for root in roots:
        for s in live.slices_of(engine):
            s.tensor.detach().fill_(3)
        engine.load_checkpoint(root)
        hashes, moments = torch.load(f"{root}/reference.pt", weights_only=True)
        got = _state(engine)
        checked = {k for k in got if k.split("/")[0] in EXACT or not moments}
        wrong = [k for k in checked if got[k] != hashes.get(k)]
        wrong += [k for k in hashes if k.split("/")[0] in EXACT and k not in got]
        how = "equal"
        for flat, kind in eight_bit(engine):
            told, bad = compare(flat, kind, moments)
            how = told if told != "equal" else how
            wrong += bad
        hows, wrongs = zip(*ranks.all_gather_object((how, wrong)))
        answers.append((max(hows, key=len), sorted({w for ws in wrongs for w in ws})))
    engine.close()
    return answers


def compare(flat, kind: str, moments) -> tuple[str, list[str]]:
    """An 8-bit moment of one flat tensor against the saved values."""
    scale_kind, signed = MOMENTS[kind]
    got, want = values_of(flat, kind), torch.zeros(flat.tensor.numel())
    inside = torch.zeros(flat.tensor.numel(), dtype=torch.bool)
    for name, _, start, at, count in flat.pieces:
        want[at : at + count] = moments[kind, name][start : start + count]
        inside[at : at + count] = True
    if torch.equal(got[inside], want[inside]):
        return "equal", []
    codes, scales = arithmetic.encode(want, signed)
    assert scales.numel() == -(-want.numel() // BLOCK_ELEMS)
    same = torch.equal(flat.state[kind].view(-1), codes) and torch.equal(flat.state[scale_kind].view(-1), scales)
    return "re-encoded", [] if same else [f"{kind} of {flat.own_name}"]


def grid(pools, work: Path, optimizer: str, pairs: list[tuple[Run, Run]]) -> list[dict]:
    """Save once for each run that saves, build one engine for each that loads; an answer for each pair."""
    answers = []
    for saved in sorted({a for a, _ in pairs}):
        pools(saved.world).run(save, str(folder(work, optimizer, saved)), optimizer, saved.stage, saved.offload)
    for now in sorted({b for _, b in pairs}):
        sources = [a for a, b in pairs if b == now]
        roots = [str(folder(work, optimizer, a)) for a in sources]
        told = pools(now.world).run(load, roots, optimizer, now.stage, now.offload, limit_s=600)[0]
        answers += [
            {"optimizer": optimizer, "saved": list(a), "now": list(now), "how": how, "wrong": wrong}
            for a, (how, wrong) in zip(sources, told)
        ]
    return answers


def folder(work: Path, optimizer: str, run: Run) -> Path:
    """Where one run saves."""
    return work / f"{optimizer} {run}"  # with a space, as users have


def covering(optimizer: str, together: int, worlds=(1, 2, 3), seed: int = 1) -> list[tuple[Run, Run]]:
    """Few pairs of runs in which every combination of `together` values of (ranks, stage, offload) before and after occurs."""
    every = list(itertools.product(runs(optimizer, worlds), repeat=2))
    random.Random(seed).shuffle(every)

    def covers(pair: tuple[Run, Run]) -> set:
        return set(itertools.combinations(enumerate((*pair[0], *pair[1])), together))

    missing, picked = set().union(*map(covers, every)), []
    while missing:
        best = max(every, key=lambda pair: len(covers(pair) & missing))
        missing -= covers(best)
        picked.append(best)
    return picked


def table(answers: list[dict]) -> str:
    """Markdown: for each optimizer, how many pairs there are and how they came out."""
    lines = [
        "Every way to run saves after three steps, every one loads what each of them saved (`python -m tests.ranks.reshard`): 1 to 4",
        "ranks, ZeRO stages 0 to 3, optimizer offload on and off, as far as the optimizer allows it. Compared: weights, masters,",
        "remainders and moments, bit for bit. Moments of 8 bits have one scale for 256 elements of a flat partition: where partitions are",
        "cut alike the codes come back as they were; elsewhere the moments are, bit for bit, the saved values encoded anew in this",
        "run's blocks (they move by half a step between codes at most; FORMAT.md, Manifest, 7).",
        "",
        "| optimizer | ways to run | pairs (saved, loaded) | all bits equal | 8-bit moments encoded anew, all else equal | wrong |",
        "|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        mine = [a for a in answers if a["optimizer"] == name]
        if mine:
            count = Counter("wrong" if a["wrong"] else a["how"] for a in mine)
            ways = len({tuple(a["now"]) for a in mine})
            lines.append(f"| {name} | {ways} | {len(mine)} | {count['equal']} | {count['re-encoded']} | {count['wrong']} |")
    return "\n".join(lines)


def main() -> int:
    """Run the grid of the optimizers asked for, and write the table of all that ran in this folder so far."""
    from tests.ranks.pool import Pools

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--optimizer", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    pools = Pools()
    for name in args.optimizer:
        answers = grid(pools, args.work, name, list(itertools.product(runs(name), repeat=2)))
        (args.work / f"{name}.json").write_text(json.dumps(answers))
        print(table(answers).splitlines()[-1], [a for a in answers if a["wrong"]][:5], flush=True)
    pools.stop()
    told = [a for file in sorted(args.work.glob("*.json")) for a in json.loads(file.read_text())]
    if args.table:
        put_table(args.table, table(told))
    return int(any(a["wrong"] for a in told))


if __name__ == "__main__":
    raise SystemExit(main())
