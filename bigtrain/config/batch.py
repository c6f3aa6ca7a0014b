"""The batch identity: global batch = micro batch x accumulation x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
GLOBAL = "train_batch_size"
MOST_ROWS = 2**40  # of one step; beyond it is a slip of the hand, and what counts bytes or steps by it overflows


class BatchError(ValueError):
    """The numbers contradict each other, or are beyond any run; the text has all of them, their sources and, of the first, one valid choice."""


@dataclass(frozen=True)
class Given:
    """A number and who said it (`file`, `flag`, `launcher`)."""

    value: int
    source: str


@dataclass(frozen=True)
class Batch:
    """A solved triple; `sources` maps each key to who decided it and why."""

    micro: int
    accumulation: int
    total: int
    sources: dict[str, tuple[str, str]]


def solve_batch(
    micro: Given | None, accumulation: Given | None, total: Given | None, ranks: int, ranks_source: str = "launcher"
) -> Batch:
    """Complete the triple from any of its members.

    With one member or none, accumulation is 1 first, then the micro batch is 1 (DeepSpeed's own order,
    runtime/config.py:_set_batch_related_parameters, which truncates where this raises).

    Args:
        micro, accumulation, total: what is known, in rows, micro steps, rows.
        ranks: data-parallel ranks.
        ranks_source: who said how many ranks there are.

    Raises:
        BatchError: the numbers do not fit together, or one step has more than `MOST_ROWS`.
    """
    if total is None:
        m = micro.value if micro else 1
        a = accumulation.value if accumulation else 1
        _refuse_too_many(micro, accumulation, None, m * a * ranks, f"{ranks} ranks ({ranks_source})")
        return Batch(m, a, m * a * ranks, _sources(micro, accumulation, None))
    _refuse_too_many(micro, accumulation, total, total.value, "")
    per_rank, rest = divmod(total.value, ranks)
    if not micro and not accumulation:
        m, a = per_rank, 1
    elif not micro:
        m, a = per_rank // accumulation.value, accumulation.value  # type: ignore[union-attr]
    elif not accumulation:
        m, a = micro.value, per_rank // micro.value
    else:
        m, a = micro.value, accumulation.value
    if rest or m < 1 or a < 1 or m * a * ranks != total.value:
        raise BatchError(_explain(micro, accumulation, total, ranks, ranks_source))
    return Batch(m, a, total.value, _sources(micro, accumulation, total))


def _refuse_too_many(micro: Given | None, accumulation: Given | None, total: Given | None, rows: int, ranks_said: str) -> None:
    if rows > MOST_ROWS:
        named = {MICRO: micro, ACCUMULATION: accumulation, GLOBAL: total}
        said = ", ".join(f"{name} {given.value} ({given.source})" for name, given in named.items() if given)
        raise BatchError(f"{said or ranks_said}: a step of {rows:,} rows is more than any run has, {MOST_ROWS:,}")


def _sources(micro: Given | None, accumulation: Given | None, total: Given | None) -> dict[str, tuple[str, str]]:
    """Who decided each number: a given one names its source, a computed one says how."""
    known = {MICRO: micro, ACCUMULATION: accumulation, GLOBAL: total}
    how = {
        MICRO: "global batch / (accumulation x ranks)" if total else "nothing said: one row",
        ACCUMULATION: "global batch / (micro batch x ranks)" if total and micro else "nothing said: no accumulation",
        GLOBAL: "micro batch x accumulation x ranks",
    }
    return {key: (g.source, "as given") if g else ("default", how[key]) for key, g in known.items()}


def _explain(micro: Given | None, accumulation: Given | None, total: Given, ranks: int, ranks_source: str) -> str:
    def said(name: str, given: Given | None) -> str:
        return f"{name} {given.value} ({given.source})" if given else f"{name} (not given)"

    m, a, t = nearest_valid(micro, accumulation, total, ranks)
    product = f" = {micro.value * accumulation.value * ranks}" if micro and accumulation else ""
    return (
        f"{said(GLOBAL, total)} cannot be {said(MICRO, micro)} x {said(ACCUMULATION, accumulation)} "
        f"x ranks {ranks} ({ranks_source}){product}. One valid choice: {GLOBAL} {t}, {MICRO} {m}, {ACCUMULATION} {a}"
    )


def nearest_valid(micro: Given | None, accumulation: Given | None, total: Given, ranks: int) -> tuple[int, int, int]:
    """(micro, accumulation, total) that fits, keeping micro and accumulation where they are known."""
    m = micro.value if micro else 1
    if accumulation:
        a = accumulation.value
        if not micro:
            m = max(1, round(total.value / (a * ranks)))
    else:
        a = max(1, round(total.value / (m * ranks)))
    return m, a, m * a * ranks
