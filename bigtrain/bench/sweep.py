"""Run the cells of a grid one after the other; every one becomes a row of OUT/rows.jsonl, whatever happens to it.

OUT/predictions.jsonl   what the planner said, with the time, written before the cell started
OUT/rows.jsonl          one row a cell, written when it ended; rows.csv, pareto.png and report.html are made from it
OUT/cells/<key>/        cell.json, ds_config.json, rank<r>.log, out/ (what launch/train.py or the peer wrote)
OUT/inputs/             the data
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bigtrain.bench import inputs, prediction, result
from bigtrain.bench.grid import Cell, labels
from bigtrain.bench.machine import Machine
from bigtrain.bench.processes import Ended, python_path, run_ranks
from bigtrain.bench.rows import append_jsonl, read_rows
from bigtrain.errors import UsageError
from bigtrain.plan.cli import model_config
from bigtrain.versions import versions

logger = logging.getLogger(__name__)

CLONE = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "bigtrain": "launch/train.py",
    "raw_deepspeed": "launch/peers/raw_deepspeed.py",
    "hf_trainer": "launch/peers/hf_trainer.py",
}
# Arguments that may name a file, folder or pattern from where the sweep is started.
PATHS = ("model_name_or_path", "tokenizer_name_or_path", "train_data", "eval_data")
# With less time than this left of a call no cell is started: most of it would be imports.
LEAST_CELL_S = 25.0
# Cells that ended so are run again when asked to; the others are results.
WORTH_ANOTHER_TRY = ("crash", "killed", "timeout", "usage")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Where and on what a sweep runs.

    Attributes:
        out: its folder. machine: what the cells run on. code: commit, or a hash of the sources where files differ from it.
        retry: run failed cells again. total_s: start no cell after so many seconds, and give none more than what is left of them.
    """

    out: Path
    machine: Machine
    code: str
    retry: bool = False
    total_s: float | None = None

    def run(self, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
        """All cells; yields each row as it is written. Cells that have a row already are passed over.

        Raises:
            UsageError: programs of the cells are missing, the folder cannot be made, or another sweep is at work in it.
        """
        missing = {name for cell in cells if not (CLONE / (name := PROGRAMS[cell.runner])).is_file()}
        if missing:
            raise UsageError(f"sweeps run from a clone of the project; not found in {CLONE}: {', '.join(sorted(missing))}")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.out} cannot be made: {error.strerror}. Give another --output_dir") from error
        begin = time.monotonic()
        with alone_in(self.out):
            for cell, label in zip(cells, labels(cells)):
                if not self.waits(cell):
                    continue
                left = float("inf") if self.total_s is None else begin + self.total_s - time.monotonic()
                if left < LEAST_CELL_S:
                    return
                key = cell.key(self.code, self.machine.card)
                limit = f"--total_s {self.total_s:g}" if left < cell.max_cell_s else f"max_cell_s {cell.max_cell_s:g}"
                row = self._run_cell(replace(cell, max_cell_s=min(cell.max_cell_s, left)), key, label, limit)
                append_jsonl(self.out / "rows.jsonl", row)
                yield row

    def waits(self, cell: Cell) -> bool:
        """Whether the cell has no row yet, or one that is worth another try."""
        old = {row["cell"]: row for row in read_rows(self.out / "rows.jsonl")}.get(cell.key(self.code, self.machine.card))
        return old is None or self._again(old, cell)

    def _again(self, old: Mapping[str, Any], cell: Cell) -> bool:
        if old["status"] == "timeout" and cell.max_cell_s > old["max_cell_s"]:
            return True
        return self.retry and old["status"] in WORTH_ANOTHER_TRY

    def _run_cell(self, cell: Cell, key: str, label: str, limit: str) -> dict[str, Any]:
        said = prediction.prediction(cell, self.machine) if cell.runner == "bigtrain" else {"none": "a peer: not planned"}
        head = {
            "cell": key, "label": label, "runner": cell.runner, "model": cell.model, "num_gpus": cell.num_gpus,
            "card": self.machine.card, "code": self.code, "settings": cell.settings(), "ds_config": cell.ds_config,
            "max_cell_s": cell.max_cell_s,
        }  # fmt: skip
        predicted_at = utc_now()
        append_jsonl(self.out / "predictions.jsonl", {**head, "predicted": said, "predicted_at": predicted_at})
        started = utc_now()
        try:
            body = self._measure(cell, key, said, limit)
        except (OSError, UsageError) as error:  # the cell could not even be started: a row like any other
            body = {"status": "usage", "error": str(error)[:400]}
        except Exception as error:  # what it wrote is not what a run writes: not the end of the sweep either
            logger.exception("cell %s", key)
            body = {"status": "crash", "error": f"its result cannot be read: {error!r}"[:400]}
        times = {"predicted_at": predicted_at, "started": started, "ended": utc_now()}
        return {**head, **times, "predicted": said, **body, "versions": versions()}

    def _measure(self, cell: Cell, key: str, said: Mapping[str, Any], limit: str) -> dict[str, Any]:
        folder = self.out / "cells" / key
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "out").mkdir(parents=True)
        command = self._command(cell, folder)
        ended = run_ranks(
            command,
            world=cell.num_gpus,
            logs=folder,
            limit_s=cell.max_cell_s,
            env=self._env(cell),
            cwd=folder,
            cards=self.machine.cards,
        )
        status, error, rows = result.read_cell(folder / "out", ended, cell.steps, limit)
        body: dict[str, Any] = {"status": status, "error": error, "exit_codes": ended.exit_codes, "wall_s": ended.seconds}
        body["steps_done"] = len(rows[0])
        body |= self._numbers(cell, ended, rows)
        body["prediction_error"] = result.errors(said, body) if status == "ok" else {}
        return body

    def _numbers(self, cell: Cell, ended: Ended, rows: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
        numbers = result.memory(rows, ended) | result.timing(rows[0], cell.warmup)
        if "step_time_s" not in numbers:
            return numbers
        numbers["tokens_per_step"] = tokens = rows[0][-1]["tokens"]
        try:
            formula = prediction.flops_formula(prediction.planned(cell, self.machine).input)
        except Exception:  # `predicted` says why
            formula = None
        card = self.machine.card if self.machine.device == "cuda" else None
        return numbers | result.speed(numbers["step_time_s"]["median"], tokens, cell.num_gpus, formula, card)

    def _env(self, cell: Cell) -> dict[str, str]:
        bins = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]  # ninja lives beside the interpreter
        told = {
            "PYTHONPATH": python_path(CLONE), "PATH": os.pathsep.join(bins), "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_CACHE": str((self.out / "inputs" / "cache").resolve()),
        }  # fmt: skip
        if self.machine.device == "cpu":
            told |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return told | cell.env

    def _command(self, cell: Cell, folder: Path) -> list[str]:
        """The command line of a rank; writes what it refers to."""
        values = model_config(cell.model)
        args = cell.arguments
        batch = (
            cell.num_gpus
            * int(args.get("per_device_train_batch_size") or 1)
            * int(args.get("gradient_accumulation_steps") or 1)
        )
        shared = (self.out / "inputs").resolve()
        rows = inputs.make_rows(shared, vocab=inputs.vocabulary(values), seq_len=cell.seq_len, at_least=batch)
        program = [sys.executable, str(CLONE / PROGRAMS[cell.runner])]
        write_json(folder / "cell.json", {**cell.settings(), "ds_config_content": cell.ds_config})
        if cell.runner != "bigtrain":
            return [*program, str(self._peer_file(cell, folder.resolve(), rows, values))]
        told = {"packing": cell.told.packing, "train_data": rows / "rows.parquet", **args, **_here(args)}
        told.setdefault("tokenizer_name_or_path", inputs.make_tokenizer(shared))
        told |= {"max_steps": cell.steps, "report_to": "none", "disable_tqdm": True, "no_export": True,
                 "overwrite_output_dir": True, "output_dir": folder.resolve() / "out"}  # fmt: skip
        told["ds_config"] = (
            "auto" if cell.ds_config == "auto" else write_json(folder.resolve() / "ds_config.json", cell.ds_config)
        )
        return [*program, *flags(told)]

    def _peer_file(self, cell: Cell, folder: Path, rows: Path, model: Mapping[str, Any]) -> Path:
        """Everything that a peer needs, in one file: it imports nothing of bigtrain."""
        filled, asked = prediction.resolved(cell, self.machine), copy.deepcopy(cell.ds_config)
        if self.machine.device == "cpu":
            _without_a_compiler(filled.config)
            _without_a_compiler(asked)
        write_json(folder / "model" / "config.json", model)
        run = {k: v for k, v in vars(filled.run).items() if v is not None}
        told = {
            "arguments": cell.arguments, "run": run, "steps": cell.steps, "model": folder / "model", "rows": rows / "rows.npy",
            "ds_config": asked, "ds_config_resolved": filled.config, "output_dir": folder / "out",
        }  # fmt: skip
        return write_json(folder / "peer.json", told)


def _without_a_compiler(config: dict[str, Any]) -> None:
    """On CPUs DeepSpeed would compile its FusedAdam, for minutes in a new environment; torch's AdamW computes the same."""
    offloaded = (config.get("zero_optimization") or {}).get("offload_optimizer")
    optimizer = config.get("optimizer")
    if optimizer and not offloaded and str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {})["torch_adam"] = True


def _here(arguments: Mapping[str, Any]) -> dict[str, Path]:
    """Files and folders that were named from where the sweep was started: its ranks run in folders of their own."""
    named = {name: Path(str(arguments[name])).expanduser() for name in PATHS if arguments.get(name)}
    return {name: path.absolute() for name, path in named.items() if path.exists() or glob.glob(str(path), recursive=True)}


def flags(values: Mapping[str, Any]) -> list[str]:
    """Arguments as words of a command line: True is a bare flag, False of a plain switch is its absence."""
    words: list[str] = []
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words += [] if name.startswith("no_") else [f"--{name}", "false"]
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def code_version() -> str:
    """The commit if the files are as committed, else a hash of the sources that cells run."""
    commit = versions().get("commit", "")
    if commit and " " not in commit:
        return commit
    digest = hashlib.sha256()
    for folder in ("bigtrain", "launch"):
        for file in sorted((CLONE / folder).rglob("*.py")):
            digest.update(str(file.relative_to(CLONE)).encode() + file.read_bytes())
    return f"sources {digest.hexdigest()[:16]}"


def with_limits(cells: Sequence[Cell], max_cell_s: float | None, cap_gib: float | None) -> list[Cell]:
    """The cells with a time limit and a memory cap from the command line; a cap in the grid stands."""
    out = []
    for cell in cells:
        cap = {} if cap_gib is None else {"gpu_memory_cap": cap_gib}
        limit = cell.max_cell_s if max_cell_s is None else max_cell_s
        out.append(replace(cell, max_cell_s=limit, arguments={**cap, **cell.arguments}))
    return out


def utc_now() -> str:
    """Time stamp with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_json(path: Path, values: Any) -> Path:
    """Write a file, its folder too if need be; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
    return path


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two sweeps in one folder would run the same cells in the same places; the lock ends with the process that holds it.

    Raises:
        UsageError: another sweep has it.
    """
    with open(folder / "lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another sweep is at work in {folder}: wait for it, or give another --output_dir") from error
        yield
