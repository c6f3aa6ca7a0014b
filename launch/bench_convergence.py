"""The same training by every optimizer and offload path, beside fp32-master AdamW with three seeds.

    python launch/bench_convergence.py --folder out/convergence --parallel 6 \\
        --table docs/results/convergence.md --picture docs/results/convergence.png
    python launch/bench_convergence.py --folder out/convergence --report_only --table ... --picture ...   # from what is there

Each run is launch/train.py on the source of Python's standard library: a model from scratch (or --model DIR, pretrained), the
same data, schedule and clipping. Seeds are those of weights and sample order; whatever is compared with fp32 AdamW has seed 1. The
losses of a finished run are kept as FOLDER/NAME.json, so that the same command goes on where it was; everything else a run
writes is in --work. `--parallel` runs share one card: their speed is not measured here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.bench.processes import python_path, rank_environment
from bigtrain.diagnostics.pages import put_table
from bigtrain.hosts.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
LAST = 20  # steps whose mean is the final loss
SMOOTH = 10  # steps of the moving mean in the picture
REFERENCES = ("adamw-seed1", "adamw-seed2", "adamw-seed3")
Result = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run: its name, optimizer, ds_config and seed."""

    name: str
    optim: str
    config: str
    seed: int = 1


def all_runs() -> list[Run]:
    """The references first, so that a run that was cut short can be judged."""
    runs = [Run(name, "adamw", "zero2", seed) for seed, name in enumerate(REFERENCES, 1)]
    runs.append(Run("adamw-offload", "adamw", "zero2_offload"))
    for optim in ("adamw_8bit", "adamw_split", "adamw_split_bf16", "adamw_split_8bit"):
        runs += [Run(optim, optim, "zero2"), Run(f"{optim}-offload", optim, "zero2_offload")]
    runs.append(Run("muon", "muon", "zero2"))
    runs.append(Run("adamw-stage3-offload", "adamw", "zero3_offload"))
    runs.append(Run("adamw_split_8bit-stage3-offload", "adamw_split_8bit", "zero3_offload"))
    return runs


# ---------------------------------------------------------------- running


class Bench:
    """The runs and where they are kept."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.folder, self.work = Path(args.folder), Path(args.work)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._ports: set[int] = set()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Corpus and tokenizer; the CPU optimizer is compiled here once instead of by all runs at the same time."""
        from bigtrain import zero
        from bigtrain.data.demo import stdlib_corpus, train_tokenizer

        data = self.work / "data"
        if not (data / "tokenizer" / "tokenizer.json").exists():
            corpus = stdlib_corpus(data, max_bytes=self.args.max_bytes)
            train_tokenizer(corpus.train_path, data / "tokenizer", self.args.vocab_size)
        if why := zero.why_no_cpu_adam():
            print(f"no CPU Adam here, its runs will fail: {why}", file=sys.stderr, flush=True)

    def command(self, run: Run, out: Path) -> list[str]:
        """The line of one run."""
        a, data = self.args, self.work / "data"
        preset = a.model.startswith("preset:")
        words = {
            "model_name_or_path": a.model,
            "tokenizer_name_or_path": data / "tokenizer" if preset else a.model,
            "train_data": data / "train.jsonl",
            "eval_data": data / "validation.jsonl",
            "output_dir": out,
            "ds_config": ROOT / "ds_configs" / f"{run.config}.json",
            "optim": run.optim,
            "seed": run.seed,
            "seq_len": a.seq_len,
            "per_device_train_batch_size": a.micro_batch,
            "gradient_accumulation_steps": a.accumulation,
            "max_steps": a.steps,
            "learning_rate": a.learning_rate,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
            "lr_scheduler_type": "cosine",
            "warmup_steps": max(1, a.steps // 10),
        }
        flags = ["--no_export", "--no_preflight", "--no_plan", "--disable_tqdm", "--overwrite_output_dir"]
        flags += ["--resize_vocab"] if preset else []
        return [sys.executable, str(ROOT / "launch" / "train.py"), *(f"--{k}={v}" for k, v in words.items()), *flags]

    def one(self, run: Run) -> None:
        """Run it, unless its losses are there already; a failure is kept in FOLDER/NAME.failed and does not end the others."""
        kept, failed = self.folder / f"{run.name}.json", self.folder / f"{run.name}.failed"
        if kept.exists():
            return
        out = self.work / run.name
        out.mkdir(parents=True, exist_ok=True)
        for old in ("metrics.jsonl", "eval.jsonl"):
            (out / old).unlink(missing_ok=True)
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.args.parallel))
        more = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": python_path(ROOT)}
        begin, log = time.monotonic(), self.work / f"{run.name}.log"
        with open(log, "wb") as file:
            env = rank_environment(0, 1, self._port(), run.name, more)
            command = self.command(run, out)
            try:
                code = subprocess.run(
                    command, env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=self.args.limit_s
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        seconds = time.monotonic() - begin
        if code == 0:
            failed.unlink(missing_ok=True)
            kept.write_text(json.dumps(self._result(run, out, seconds)) + "\n", encoding="utf-8")
        else:
            tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            failed.write_text(f"exit code {code} (None: over {self.args.limit_s} s)\n{tail}\n", encoding="utf-8")
        print(f"{run.name}: exit code {code} after {seconds:.0f} s", file=sys.stderr, flush=True)

    def _port(self) -> int:
        with self._lock:
            while (port := free_port()) in self._ports:
                pass
            self._ports.add(port)
            return port

    def _result(self, run: Run, out: Path, seconds: float) -> Result:
        from bigtrain.diagnostics.metrics import read_rows

        rows, evals = read_rows(out / "metrics.jsonl"), read_rows(out / "eval.jsonl")
        if [row["step"] for row in rows] != list(range(1, self.args.steps + 1)) or not evals:
            raise RuntimeError(f"{out}/metrics.jsonl does not hold the steps 1 to {self.args.steps} and an evaluation")
        told = json.loads((out / "run.json").read_text(encoding="utf-8"))
        return {
            "name": run.name,
            "optim": run.optim,
            "ds_config": run.config,
            "seed": run.seed,
            "model": self.args.model,
            "tokens_per_step": rows[-1]["tokens"],
            "seq_len": self.args.seq_len,
            "learning_rate": self.args.learning_rate,
            "device": (told.get("placement") or [{}])[0].get("device") or platform.processor() or "cpu",
            "loss": [row["loss"] for row in rows],
            "grad_norm": [row["grad_norm"] for row in rows],
            "eval_loss": evals[-1]["eval_loss"],
            "eval_tokens": evals[-1]["eval_tokens"],
            "seconds": round(seconds, 1),
        }

    def run(self) -> None:
        """All that are not there yet, `parallel` at a time."""
        wanted = [run for run in all_runs() if not self.args.only or run.name in self.args.only]
        left = [run for run in wanted if not (self.folder / f"{run.name}.json").exists()]
        if not left:
            return
        self.prepare()
        with ThreadPoolExecutor(self.args.parallel) as pool:
            list(pool.map(self.one, left))


# ---------------------------------------------------------------- reporting


def read_results(folder: Path) -> dict[str, Result]:
    """What has finished, in the order of the runs."""
    names = [run.name for run in all_runs() if (folder / f"{run.name}.json").exists()]
    return {name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def final(result: Result) -> float:
    """Mean loss of the last steps."""
    return statistics.fmean(result["loss"][-LAST:])


@dataclass(frozen=True)
class Judged:
    """One run beside the references: training loss and evaluation loss, and their differences to the references' means."""

    loss: float
    loss_apart: float
    loss_within: bool
    evaluation: float
    evaluation_apart: float
    evaluation_within: bool
    same_seed_apart: float


def judge(results: Mapping[str, Result]) -> tuple[dict[str, Judged], tuple[float, float]]:
    """Every run, and the spreads (largest - smallest) of the references' final training and evaluation losses.

    Raises:
        SystemExit: a reference is missing.
    """
    if missing := [name for name in REFERENCES if name not in results]:
        raise SystemExit(f"not all references are there: {', '.join(missing)} missing")
    losses = [final(results[name]) for name in REFERENCES]
    evals = [results[name]["eval_loss"] for name in REFERENCES]
    spreads = max(losses) - min(losses), max(evals) - min(evals)
    found = {}
    for name, result in results.items():
        loss, evaluation = final(result), result["eval_loss"]
        apart, eval_apart = loss - statistics.fmean(losses), evaluation - statistics.fmean(evals)
        found[name] = Judged(
            loss, apart, abs(apart) <= spreads[0], evaluation, eval_apart, abs(eval_apart) <= spreads[1],
            loss - final(results[REFERENCES[0]]),
        )  # fmt: skip
    return found, spreads


def table(results: Mapping[str, Result], failed: Sequence[str]) -> str:
    """The page."""
    judged, spreads = judge(results)
    first = results[REFERENCES[0]]
    lines = [
        "# Every optimizer and offload path, the same training",
        "",
        f"{len(first['loss'])} steps of {first['model']}, {first['tokens_per_step']:,} tokens a step in rows of {first['seq_len']}, "
        f"source text of Python's standard library, peak learning rate {first['learning_rate']:g} (cosine, a tenth of the steps warm-up), "
        f"beta2 0.95, weight decay 0.1, clipping at 1; `python launch/bench_convergence.py`. The reference is AdamW "
        "with fp32 masters and fp32 moments, with three seeds (weights and order of the samples); all others have seed 1.",
        "",
        f"Final loss: mean of the last {LAST} steps. Evaluation: {first['eval_tokens']:,} target tokens of files that are not trained "
        f"on. Spread of the three references (largest - smallest): {spreads[0]:.4f} in the final loss, {spreads[1]:.4f} in the "
        'evaluation. "Within": the difference to the references\' mean is no larger than that spread.',
        "",
        "| run | ds_config | device | seed | final loss | to the fp32 mean | within | to fp32, same seed | evaluation | to the fp32 mean | within |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    last = [name for name in results if results[name]["optim"] == "muon"]
    for name in [*(n for n in results if n not in last), *last]:
        r, j = results[name], judged[name]
        within, eval_within = ("yes" if x else "**no**" for x in (j.loss_within, j.evaluation_within))
        if name in last:  # another method: a better or worse loss says nothing about its arithmetic
            within = eval_within = "another method"
        lines.append(
            f"| {name} | {r['ds_config']} | {r['device']} | {r['seed']} | {j.loss:.4f} | {j.loss_apart:+.4f} | {within} | {j.same_seed_apart:+.4f} | "
            f"{j.evaluation:.4f} | {j.evaluation_apart:+.4f} | {eval_within} |"
        )
    lines += ["", *(f"Failed: {name}." for name in failed)]
    return "\n".join(lines).rstrip() + "\n"


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, SMOOTH in all."""
    return [statistics.fmean(values[max(0, i + 1 - SMOOTH) : i + 1]) for i in range(len(values))]


def draw(results: Mapping[str, Result], file: Path) -> None:
    """Left: smoothed loss of every run. Right: its difference to fp32 AdamW of the same seed, and the references' in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    curves = {name: smooth(result["loss"]) for name, result in results.items()}
    reference = curves[REFERENCES[0]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    colours = plt.get_cmap("tab20")
    steps = range(1, len(reference) + 1)
    for i, (name, curve) in enumerate(curves.items()):
        grey = name in REFERENCES
        dashed = "--" if results[name]["ds_config"] != "zero2" else "-"
        look: dict[str, Any] = {"color": "0.55" if grey else colours(i % 20), "lw": 2.5 if grey else 1.1, "ls": dashed}
        left.plot(steps, curve, label=name, **look)
        if name != REFERENCES[0] and results[name]["optim"] != "muon":
            right.plot(steps, [a - b for a, b in zip(curve, reference)], label=name, **look)
    right.axhline(0, color="0.55", lw=2.5)
    left.set(xlabel="step", ylabel=f"training loss, mean of {SMOOTH} steps", title="loss")
    left.legend(fontsize=7, ncols=2)
    right.set(xlabel="step", ylabel="difference", title="difference to fp32 AdamW with seed 1 (grey: its other seeds)")
    right.grid(color="0.9")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def report(args: argparse.Namespace) -> None:
    """Table and picture of what has finished."""
    folder = Path(args.folder)
    results = read_results(folder)
    page = table(results, sorted(p.stem for p in folder.glob("*.failed")))
    if args.picture:
        try:
            draw(results, args.picture)
            page += f"\n![loss curves]({args.picture.name})\n"
        except ImportError:
            print("no matplotlib here: draw the picture elsewhere with --report_only", file=sys.stderr)
    if args.table:
        put_table(args.table, page)
    print(page)


def main() -> int:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/convergence", help="a small file of losses for each finished run")
    parser.add_argument(
        "--work", default=str(Path(tempfile.gettempdir()) / "bench_convergence"), help="data, logs, run folders"
    )
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--model", default="preset:llama-50m", help="a preset from scratch, or a pretrained folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_bytes", type=int, default=24_000_000, help="of text, if the library has as much")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--limit_s", type=float, default=300.0, help="for one run")
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"of {', '.join(run.name for run in all_runs())}")
    parser.add_argument("--report_only", action="store_true")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if not args.report_only:
        Bench(args).run()
    report(args)
    return 1 if any(Path(args.folder).glob("*.failed")) else 0


if __name__ == "__main__":
    sys.exit(main())
