"""Loss over an evaluation set, with the same number of forwards on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from bigtrain import ranks
from bigtrain.engine import steps
from bigtrain.engine.steps import Batch, EvalResult
from bigtrain.errors import DataError, RanksDisagreeError, StoppedError
from bigtrain.meeting import Point, meet, naming_the_lost

if TYPE_CHECKING:
    from bigtrain.engine import Engine


@naming_the_lost()
@torch.no_grad()
def evaluate(engine: Engine, batches: Iterable[Batch], limit_s: float | None, stop: Callable[[], bool]) -> EvalResult:
    """See `Engine.evaluate`."""
    meet(Point.EVALUATE, engine.global_step, 0, limit_s=limit_s)
    modes = {m: m.training for m in engine.module.modules()}
    engine.module.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    ran = False
    try:
        for batch, count in _in_step(engine, batches, stop):
            ran = True
            loss = steps.loss_of(engine(**steps.move(batch, engine.device, engine.dtype)))
            if count:
                sums[0] += loss.double() * count
                sums[1] += count
    finally:
        for module, mode in modes.items():  # one by one: frozen parts may have been in eval mode before
            module.training = mode
    rows = ranks.all_gather_object(sums.tolist())
    total = int(sum(row[1] for row in rows))
    if not ran:
        raise DataError(
            "evaluate() got no batch on any rank: an empty list, or a generator that an earlier evaluation has used up. Give it a list, or "
            "something that begins anew each time, such as a DataLoader."
        )
    if total == 0:
        raise DataError("evaluate(): no target token in any rank's batches: every label is -100, so that there is no loss.")
    return EvalResult(math.fsum(row[0] for row in rows) / total, total)


def _in_step(engine: Engine, batches: Iterable[Batch], stop: Callable[[], bool]) -> Iterator[tuple[Batch, int]]:
    """This rank's batches with their target counts; after its last one, that one again with a count of 0 until all are done."""
    source: Iterator[Any] = itertools.chain.from_iterable((batches,))  # which calls iter() as late as next()
    last: Batch | None = None
    number = 0
    while True:
        number += 1
        batch, count, failure = _next(source, engine)
        last = last if batch is None else batch
        told = meet(
            Point.EVALUATE,
            engine.global_step,
            number,
            (batch is not None, last is not None, 2 * (failure is not None) + stop()),
        )
        if any(row[2] >= 2 for row in told):
            with ranks.together(f"evaluate(): reading batch {number}"):
                if failure is not None:
                    raise failure
        if not any(row[0] for row in told):
            return
        if any(row[2] for row in told):
            raise StoppedError(f"evaluate() was asked to stop before batch {number}")
        empty = [r for r, row in enumerate(told) if not row[1]]
        if empty:
            raise RanksDisagreeError(
                f"evaluate(): rank {', '.join(map(str, empty))} has no batch at all: give every rank one or more."
            )
        assert last is not None
        yield last if count else steps.without_targets(last), count


def _next(source: Iterator[Any], engine: Engine) -> tuple[Batch | None, int, Exception | None]:
    """The next batch, None at the end, with its targets; or what failed, which the other ranks must hear of before it is raised."""
    try:
        batch = next(source, None)
        return batch, 0 if batch is None else steps.counted(batch, engine.count_targets), None
    except Exception as error:
        return None, 0, error
