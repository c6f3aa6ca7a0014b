"""Numbers of a run: time, tokens, FLOPs, memory; one JSON row a step. No torch here, no loss scale either (bf16 has none).

What each number means:

* `step_time_s` runs from the end of one step to the end of the next, so it holds waiting for data too; evaluation and
  saving are taken out and listed by themselves. A step ends by reading its loss from the device, which is the only
  synchronisation needed; the clock adds none.
* Model FLOPs count what the mathematics needs, forward and backward. Recomputation by activation checkpointing is work
  that the hardware does and the model does not need: it is not counted.
* Summaries leave out the first steps (building kernels, filling allocators) and give the median with its spread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bigtrain.errors import BigtrainError
from bigtrain.plan.cards import peak_bf16_flops
from bigtrain.plan.geometry import attended, windows_of
from bigtrain.plan.room import room

logger = logging.getLogger(__name__)

T = TypeVar("T")
UNTIMED_STEPS = 3
HELD_S = 1800.0  # somebody may free space; a checkpoint that the disk does not take either ends the run at its second failure
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENOTCONN}


@dataclass(frozen=True, kw_only=True)
class FlopsFormula:
    """Model FLOPs per token of a decoder: 6 per trained weight, 4 per frozen one, 6 x layers x seq x hidden for attention.

    Source: Kaplan et al. 2020 (arXiv 2001.08361) section 2.1 for 6N; attention as in PaLM (arXiv 2204.02311) appendix B,
    halved because a causal row attends to half the positions on average. A frozen weight needs no weight gradient.
    `windows`: of layers in which a token sees no more than so many (sliding window); they count with twice what it sees on average
    in place of seq. `layers` or `hidden` 0 means that attention is not counted.
    """

    trained_parameters: int
    frozen_parameters: int = 0
    layers: int = 0
    hidden: int = 0
    seq_len: int = 0
    windows: tuple[int, ...] = ()

    @property
    def per_token(self) -> int:
        """FLOPs for one token, forward and backward, without recomputation."""
        seen = int(attended(self.layers, self.seq_len, self.windows))
        return 6 * self.trained_parameters + 4 * self.frozen_parameters + 6 * seen * self.hidden

    def __str__(self) -> str:
        parts = [f"6 x {self.trained_parameters:,} trained parameters"]
        if self.frozen_parameters:
            parts.append(f"4 x {self.frozen_parameters:,} frozen parameters")
        narrow = [w for w in self.windows if w < self.seq_len]
        if self.layers - len(narrow) and self.hidden:
            whole = self.layers - len(narrow)
            parts.append(f"6 x {whole} layers x {self.seq_len:,} tokens x {self.hidden:,} (causal attention)")
        for w in sorted(set(narrow)):
            seen = attended(1, self.seq_len, (w,))
            parts.append(f"6 x {narrow.count(w)} layers x {seen:,.0f} tokens x {self.hidden:,} (windows of {w:,})")
        return f"model FLOPs per token = {' + '.join(parts)} = {self.per_token:.4g}; recomputation not counted"

    def mfu(self, tokens_per_s_per_device: float, card: str | None) -> float | None:
        """Model FLOPs utilisation, 0 to 1, of one device; None if the card's peak is not known."""
        peak = peak_bf16_flops(card)
        return None if peak is None else self.per_token * tokens_per_s_per_device / peak


class StepClock:
    """Wall time from one step's end to the next, without what was `paused`."""

    def __init__(self, now: Any = time.perf_counter):
        self._now = now
        self._last = now()
        self._paused_s = 0.0
        self.totals_s: dict[str, float] = {}

    def lap(self) -> float:
        """Seconds since the last lap, pauses taken out."""
        now = self._now()
        taken_s = now - self._last - self._paused_s
        self._last, self._paused_s = now, 0.0
        return taken_s

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Time in here counts under `totals_s[what]`, not in a step."""
        begin = self._now()
        try:
            yield
        finally:
            taken_s = self._now() - begin
            self._paused_s += taken_s
            self.totals_s[what] = self.totals_s.get(what, 0.0) + taken_s


class RowLog:
    """JSON Lines, one row a step, handed to the system as it is written; a resumed run goes on after its checkpoint's step.

    Rows after `keep_to_step` (work that the resumed run will do again) and a torn last line are dropped. Rows that a full disk does not take
    are held and written with a later one, for `HELD_S` at most.

    Attributes:
        last_step: of the newest row that was there already; -1 if there is none.

    Raises:
        BigtrainError: the file cannot be written.
    """

    def __init__(self, path: str | Path, *, keep_to_step: int | None = None):
        self.path = Path(path)
        kept = [] if keep_to_step is None else [r for r in read_rows(self.path) if r["step"] <= keep_to_step]
        self.last_step = int(kept[-1]["step"]) if kept else -1
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fresh.write_text("".join(_line(row) for row in kept), encoding="utf-8")
            os.replace(fresh, self.path)
            self._open()
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise BigtrainError.not_writable(self.path, error) from error
        self._held, self._held_since = b"", 0.0

    def _open(self) -> None:
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  (for the run; without a buffer, so that a part is known)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row and hand it to the operating system.

        Raises:
            BigtrainError: it does not take it, and that will not pass, or has not for `HELD_S`.
        """
        before = len(self._held)
        self._held += _line(row).encode()
        try:
            self._hand_over()
        except OSError as error:
            if error.errno not in _PASSING or (before and time.monotonic() - self._held_since > HELD_S):
                raise self._refused(error) from error
            if not before:
                self._held_since = time.monotonic()
                logger.warning(
                    "%s takes no rows from step %d on: %s. They are kept, and training goes on, for %.0f minutes: make room on that disk",
                    self.path, row["step"], error.strerror, HELD_S / 60,
                )  # fmt: skip
        else:
            if before:
                logger.warning("%s takes rows again: none is lost", self.path)

    def rows(self) -> list[dict[str, Any]]:
        """All rows, those that are held among them."""
        return read_rows(self.path) + _parsed(self._held)

    def settle(self) -> None:
        """Write the rows that are held. How a run ended does not hang on those that the system still does not take: that is told."""
        try:
            self._hand_over()
        except OSError as error:
            logger.error("%s", self._refused(error))

    def _refused(self, error: OSError) -> BigtrainError:
        first = next((row["step"] for row in _parsed(self._held)), "?")
        return BigtrainError(
            f"the rows from step {first} on cannot be written to {self.path}: {error}. Make room on that disk and start again with "
            "--resume_from_checkpoint auto"
        )

    def _hand_over(self) -> None:
        if self._is_gone():
            self._begin_anew()
        try:
            self._append()
        except OSError as error:
            if error.errno != errno.ESTALE:  # of a network disk: another host removed the file, or the server began anew
                raise
            self._begin_anew()
            self._append()

    def _is_gone(self) -> bool:
        try:
            self.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a network disk may fail to say; whether the row is taken is what counts
            return False
        return False

    def _append(self) -> None:
        while self._held:
            self._held = self._held[self._file.write(self._held) :]

    def _begin_anew(self) -> None:
        """What is written into a file that has been removed, or moved with its folder, nobody would find beside the run's checkpoints."""
        logger.warning(
            "%s was removed, moved or lost by its disk while the run goes on: rows from here on go into a new one", self.path
        )
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def close(self) -> None:
        """Close the file; no more rows."""
        with contextlib.suppress(OSError):
            self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    # NaN and infinity are not JSON: null, with `skipped` beside it, is what every reader understands.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(plain) + "\n"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a metrics file in step order; a torn last line, or one that a crash of the machine has damaged, is left out."""
    try:
        return _parsed(Path(path).read_bytes())
    except FileNotFoundError:
        return []


def _parsed(text: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


class ProcessMemory:
    """Resident memory of this process. RSS is cheap; PSS (shared pages divided among their users) walks every page.

    PSS is therefore measured again only after 200 times as long as the last measurement took.
    """

    def __init__(self) -> None:
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._next_pss_at = 0.0
        self._pss_bytes = 0

    def rss_bytes(self) -> int:
        """Resident set size."""
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * self._page_bytes

    def share(self) -> float:
        """Part of the host's memory that is in use by everybody: of the container's limit, or of the machine's; 0: unknown."""
        now = room()
        return 0.0 if now is None else now.share

    def pss_bytes(self) -> int:
        """Proportional set size, perhaps a little old; 0 where the kernel does not tell."""
        begin = time.monotonic()
        if begin >= self._next_pss_at:
            self._pss_bytes = _read_pss_bytes()
            end = time.monotonic()
            self._next_pss_at = end + 200 * (end - begin)
        return self._pss_bytes


def _read_pss_bytes() -> int:
    try:
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def steady(values: Sequence[T]) -> Sequence[T]:
    """The values without the first UNTIMED_STEPS, which are slower; of a very short run, without the first third."""
    return values[min(UNTIMED_STEPS, len(values) // 3) :]


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
    }


def summarise(
    rows: Sequence[Mapping[str, Any]], pauses_s: Mapping[str, float] | None = None, resumed_after: int = 0
) -> dict[str, Any]:
    """Final numbers of a run from its metrics rows; speeds without the first steps, as median with spread.

    Args:
        rows: rows of metrics.jsonl, in order: those of all starts of the run.
        pauses_s: seconds outside steps by cause (evaluation, saving), of this start.
        resumed_after: the step that this start went on from; 0: it is the only one. What this start alone did is then under
            `since_resume_...`, and what has no such name is of all starts.
    """
    if not rows:
        return {"steps": 0}
    losses = [r["loss"] for r in rows if r["loss"] is not None]
    measured = steady(rows)
    out: dict[str, Any] = {
        "steps": rows[-1]["step"],
        "tokens": sum(r["tokens"] for r in rows),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "skipped_steps": sum(bool(r.get("skipped")) for r in rows),
        "untimed_steps": len(rows) - len(measured),
        "step_time_s": spread(r["step_time_s"] for r in measured),
        "tokens_per_s": spread(r["tokens_per_s"] for r in measured),
        "train_time_s": sum(r["step_time_s"] for r in rows),
    }
    since, mine = ("since_resume_", [r for r in rows if r["step"] > resumed_after]) if resumed_after else ("", [])
    if resumed_after:
        out |= {
            "resumed_after_step": resumed_after, f"{since}steps": len(mine), f"{since}tokens": sum(r["tokens"] for r in mine),
            f"{since}train_time_s": sum(r["step_time_s"] for r in mine),
        }  # fmt: skip
    out |= {f"{since}{cause}_time_s": seconds for cause, seconds in (pauses_s or {}).items()}
    for name in ("gpu_allocated_bytes", "gpu_reserved_bytes", "gpu_used_bytes", "host_rss_bytes"):
        out[f"peak_{name}"] = max(r.get(name) or 0 for r in rows)
    if all(r.get("mfu") is not None for r in measured):
        out["mfu"] = spread(r["mfu"] for r in measured)
    return out


def flops_formula(model: Any, seq_len: int) -> FlopsFormula:
    """FLOPs per token of a built model; of routed experts only the active ones count."""
    from bigtrain import zero

    text = model.config.get_text_config() if hasattr(model, "config") else None
    experts, active = _first_of(text, _EXPERTS), _first_of(text, _ACTIVE)
    share = min(1.0, active / experts) if experts and active else 1.0
    counts = {True: 0, False: 0}
    for name, param in model.named_parameters():
        shape = zero.full_shape(param)
        # JetMoE's feed-forward experts lie in no module of that name; one matrix for each expert tells them.
        routed = ".experts." in name or (len(shape) == 3 and shape[0] == experts)
        counts[param.requires_grad] += int(math.prod(shape) * (share if routed else 1.0))
    return FlopsFormula(
        trained_parameters=counts[True],
        frozen_parameters=counts[False],
        layers=getattr(text, "num_hidden_layers", 0) or 0,
        hidden=getattr(text, "hidden_size", 0) or 0,
        seq_len=seq_len,
        windows=windows_of(text.to_dict()) if text is not None else (),
    )


# The later names are Aria's, Ernie's and Gemma 4's.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def _first_of(text: Any, names: Sequence[str]) -> int:
    """The first of these settings that is a number above 0; 0 where the config tells none."""
    found = (getattr(text, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)
