"""What a person sees while the run goes: a progress bar on rank 0, and the trackers that were asked for."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from bigtrain.errors import UsageError

logger = logging.getLogger(__name__)

GIB = 2**30
_ETA_STEPS = 20  # the time left is foretold from so many: a single slow step would double it


def status_line(row: Mapping[str, Any]) -> dict[str, str]:
    """The part of a metrics row that fits beside a progress bar."""
    loss = "not finite" if row["loss"] is None or row["loss"] != row["loss"] else f"{row['loss']:.4f}"
    shown = {"loss": loss, "lr": f"{row['lr']:.2e}", "tok/s": f"{row['tokens_per_s']:,.0f}"}
    if row.get("gpu_reserved_bytes"):
        shown["GPU"] = f"{row['gpu_reserved_bytes'] / GIB:.1f} GiB"
    shown["host"] = f"{row['host_rss_bytes'] / GIB:.1f} GiB"
    if row.get("skipped"):
        shown["skipped"] = "yes"
    return shown


class Progress:
    """A tqdm bar with ETA on a terminal; log lines where there is none, after steps that are `due`. Silent off rank 0."""

    def __init__(self, *, total_steps: int, first_step: int, due: Callable[[int], bool], enabled: bool, bar: bool = True):
        self._due, self._total, self._enabled = due, total_steps, enabled
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)
        self._bar: Any = None
        if enabled and bar and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one more step."""
        self._recent.append(row["step_time_s"])
        if self._bar is not None:
            self._bar.update(1)
        if not self._enabled or not (self._due(row["step"]) or row["step"] == self._total):
            return
        shown = status_line(row)
        if self._bar is not None:
            self._bar.set_postfix(shown)
        else:
            left_s = (self._total - row["step"]) * median(self._recent)
            text = "  ".join(f"{k} {v}" for k, v in shown.items())
            logger.info(
                "step %d/%d  %s  %.2f s/step  ETA %s", row["step"], self._total, text, row["step_time_s"], clock(left_s)
            )

    def note(self, text: str) -> None:
        """A line of its own that does not break the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        elif self._enabled:
            logger.info("%s", text)

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Tracker(Protocol):
    """Somewhere that numbers go."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""

    def close(self) -> None:
        """Everything is written."""


class TensorBoard:
    """Event files in OUT/runs."""

    def __init__(self, out: Path, settings: Mapping[str, Any], name: str | None, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        # purge_step: a resumed run hides what the earlier one logged after the checkpoint.
        self._writer = SummaryWriter(str(out / "runs"), purge_step=first_step + 1 if first_step else None)
        self._writer.add_text("settings", "\n".join(f"    {k}: {v}" for k, v in settings.items()))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        for key, value in numbers.items():
            self._writer.add_scalar(f"train/{key}" if "/" not in key else key, value, step)

    def close(self) -> None:
        """Write everything out."""
        self._writer.close()


class Wandb:
    """Weights & Biases."""

    def __init__(self, out: Path, settings: Mapping[str, Any], name: str | None, first_step: int):
        import wandb  # type: ignore[import-not-found,unused-ignore]

        self._run = wandb.init(dir=str(out), name=name, config=dict(settings), resume="allow")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """MLflow; where to is MLFLOW_TRACKING_URI's business."""

    def __init__(self, out: Path, settings: Mapping[str, Any], name: str | None, first_step: int):
        import mlflow  # type: ignore[import-not-found,unused-ignore]

        self._mlflow = mlflow
        mlflow.start_run(run_name=name)
        mlflow.log_params({k: str(v)[:500] for k, v in settings.items()})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], str | None, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": MLflow,
}


class Trackers:
    """The trackers of a run. One that fails on the way (its server is away, its disk full) is let go of: numbers are in metrics.jsonl too.

    Args:
        opened: by name.
    """

    def __init__(self, opened: Mapping[str, Tracker]):
        self._opened = dict(opened)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Record numbers of a step, in each that still takes them."""
        self._each(lambda tracker: tracker.log(numbers, step), f"step {step}")

    def close(self) -> None:
        """Everything is written that can be."""
        self._each(lambda tracker: tracker.close(), "its end")
        self._opened.clear()

    def _each(self, call: Callable[[Tracker], None], at: str) -> None:
        for name, tracker in list(self._opened.items()):
            try:
                call(tracker)
            except Exception as error:  # whatever a server's client raises: training must not end for want of a plot
                del self._opened[name]
                what = f"{type(error).__name__}: {error}"
                logger.warning(
                    "--report_to %s failed at %s and gets no more numbers; metrics.jsonl has them all: %s", name, at, what
                )


def open_trackers(
    names: Sequence[str], out: Path, settings: Mapping[str, Any], *, run_name: str | None = None, first_step: int = 0
) -> Trackers:
    """One tracker per name, ready to take numbers.

    Raises:
        UsageError: unknown name, or its package is not installed.
    """
    opened: dict[str, Tracker] = {}
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--report_to {name!r}: expected one of {', '.join(TRACKERS)}")
        try:
            opened[name] = TRACKERS[name](out, settings, run_name, first_step)
        except ImportError as error:
            raise UsageError(f"--report_to {name}: the package is not installed; run: pip install {name}") from error
    return Trackers(opened)


def loggable(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a metrics row that a tracker can plot."""
    return {k: float(v) for k, v in row.items() if k != "step" and isinstance(v, int | float) and v == v}
