"""Stop a 2-rank run again and again at random moments, go on each time, and compare with the run that nobody stopped.

    python launch/bench_sigterm.py --folder out/sigterm --table docs/results/sigterm.md

Each leg is launch/train.py under the deepspeed launcher. SIGTERM goes to one rank or to both, in start-up, between or in steps, or
while a checkpoint is written; the leg must end with exit code 75, and the next one goes on with --resume_from_checkpoint auto. In
the end every row of metrics.jsonl and every byte of the exported model must be those of the unbroken run. What is done is kept in
the folder: the same command goes on where it was (--minutes ends it after a leg).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bigtrain.bench.processes import python_path
from bigtrain.diagnostics.pages import put_table

ROOT = Path(__file__).resolve().parents[1]
COMPARED = ("step", "epoch", "loss", "lr", "grad_norm", "tokens", "target_tokens", "skipped")
LIMIT_S = 700.0


@dataclass(frozen=True)
class Leg:
    """One start: when it was told to stop, whom, at which row, how soon it had ended after that, and how."""

    moment: str
    to: str
    row: int
    seconds: float
    code: int


@dataclass
class Scenario:
    """What is run.

    Attributes:
        folder: holds data, both outputs, and what is done so far.
        steps: of the whole run. save_steps: between checkpoints, so that signals also come while one is written.
    """

    folder: Path
    steps: int = 150
    save_steps: int = 6

    def command(self, out: Path) -> list[str]:
        """The same line for the first start and for all others."""
        words = [
            "--ds_config", "ds_configs/zero3_offload.json", "--model_name_or_path", "preset:llama-tiny",
            "--tokenizer_name_or_path", self.folder / "data" / "tokenizer", "--train_data", self.folder / "data" / "train.jsonl",
            "--output_dir", out, "--seq_len", 64, "--per_device_train_batch_size", 2, "--learning_rate", 3e-3,
            "--warmup_steps", 1, "--report_to", "none", "--max_steps", self.steps, "--save_steps", self.save_steps,
            "--save_total_limit", 2, "--resume_from_checkpoint", "auto",
        ]  # fmt: skip
        launcher = ["deepspeed", "--num_accelerators", "2", "launch/train.py"]
        return [str(Path(sys.executable).parent / launcher[0]), *launcher[1:], *map(str, words)]

    def data(self) -> None:
        """A small corpus and its tokenizer."""
        from bigtrain.data.demo import stdlib_corpus, train_tokenizer

        if not (self.folder / "data" / "tokenizer").exists():
            corpus = stdlib_corpus(self.folder / "data", max_bytes=600_000, validation_every=10)
            train_tokenizer(corpus.train_path, self.folder / "data" / "tokenizer", vocab_size=512)


def start(scenario: Scenario, out: Path, log: Path) -> subprocess.Popen[bytes]:
    """The launcher, in a process group of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")}
    env = {**kept, "PYTHONPATH": python_path(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(scenario.command(out), cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)


def rank_pids(launcher: int) -> dict[int, int]:
    """Process of each rank, as far as they have begun."""
    import psutil

    found: dict[int, int] = {}
    for process in psutil.Process(launcher).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "launch/train.py" in words and "-u" in words:
            found |= {int(w.split("=")[1]): process.pid for w in words if w.startswith("--local_rank=")}
    return found


def rows(out: Path) -> list[dict[str, object]]:
    """What metrics.jsonl holds; the last line may be in the middle of being written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def leg(scenario: Scenario, out: Path, rng: random.Random, log: Path) -> Leg | None:
    """Start, stop at a random moment, wait for the end; None if the run was finished before the signal came."""
    before = len(rows(out))
    in_start = rng.random() < 0.35
    process = start(scenario, out, log)
    begun = time.monotonic()
    while len(rank_pids(process.pid)) < 2 and process.poll() is None:
        time.sleep(0.02)
    pids = rank_pids(process.pid)
    # The handler is there as soon as the script itself runs, well before torch has been imported.
    delay_s, more = (rng.uniform(1.0, 12.0), 10**9) if in_start else (rng.uniform(0.0, 0.5), rng.randrange(8))
    seen = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < LIMIT_S:
        if in_start and time.monotonic() - seen >= delay_s:
            break
        if not in_start and len(rows(out)) > before + more:
            time.sleep(delay_s)
            break
        time.sleep(0.02)
    to = rng.choice([[0], [1], [0, 1]])
    row, sent = len(rows(out)), time.monotonic()
    for rank in to:
        try:
            os.kill(pids[rank], signal.SIGTERM)
        except (KeyError, ProcessLookupError):
            process.wait(LIMIT_S)
            return None
    code = process.wait(LIMIT_S)
    moment = f"{delay_s:.1f} s after its start" if row <= before else f"after row {row}"
    return (
        None
        if code == 0
        else Leg(moment, "ranks 0 and 1" if len(to) > 1 else f"rank {to[0]}", row, time.monotonic() - sent, code)
    )


def run_legs(scenario: Scenario, signals: int, seed: int, minutes: float) -> list[Leg]:
    """Legs until so many signals have been sent; goes on from what the folder holds."""
    out, state, log = scenario.folder / "stopped", scenario.folder / "legs.json", scenario.folder / "stopped.log"
    done = [Leg(**row) for row in json.loads(state.read_text())] if state.exists() else []
    end = time.monotonic() + 60 * minutes
    while len(done) < signals and time.monotonic() < end:
        found = leg(scenario, out, random.Random(seed * 1000 + len(done)), log)
        if found is None:
            raise SystemExit(f"the run was finished after {len(done)} signals: give it more --steps")
        done.append(found)
        state.write_text(json.dumps([asdict(row) for row in done], indent=1))
        print(
            f"{len(done):2d}: SIGTERM to {found.to} {found.moment}: exit code {found.code} after {found.seconds:.1f} s",
            flush=True,
        )
    return done


def finish(scenario: Scenario, name: str) -> int:
    """Run to the end; the exit code."""
    return start(scenario, scenario.folder / name, scenario.folder / f"{name}.log").wait(2 * LIMIT_S)


def differences(folder: Path) -> list[str]:
    """Where the stopped run's rows and exported model are not those of the unbroken one."""
    whole, stopped = rows(folder / "whole"), rows(folder / "stopped")
    out = [] if len(whole) == len(stopped) else [f"{len(whole)} rows and {len(stopped)}"]
    for a, b in zip(whole, stopped):
        out += [f"step {a['step']}: {key} {a[key]!r} and {b[key]!r}" for key in COMPARED if a[key] != b[key]]
    for file in sorted((folder / "whole" / "model").glob("*.safetensors")):
        other = folder / "stopped" / "model" / file.name
        if not other.exists() or _digest(other) != _digest(file):
            out.append(f"model/{file.name}")
    return out


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def table(scenario: Scenario, legs: list[Leg], wrong: list[str]) -> str:
    """The result as Markdown."""
    result = "equal bit for bit" if not wrong else "DIFFERENT: " + "; ".join(wrong[:5])
    lines = [
        f"# {len(legs)} SIGTERMs at random moments of a run",
        "",
        f"Written by `launch/bench_sigterm.py`: launch/train.py under deepspeed, two CPU ranks, zero3_offload, preset:llama-tiny, "
        f"{scenario.steps} steps, a checkpoint every {scenario.save_steps} steps beside training; {platform.python_version()}, "
        f"{os.cpu_count()} cores. Each leg goes on with --resume_from_checkpoint auto.",
        "",
        f"All {scenario.steps} rows of metrics.jsonl ({', '.join(COMPARED)}) and the exported model against the unbroken run: "
        f"**{result}**.",
        "",
        "| leg | signal to | moment | exit code | seconds until the run had ended |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {i} | {g.to} | {g.moment} | {g.code} | {g.seconds:.1f} |" for i, g in enumerate(legs, 1)]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """0 if every leg ended with 75 and nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--save_steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further leg after so long")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    scenario = Scenario(args.folder.absolute(), args.steps, args.save_steps)
    scenario.data()
    legs = run_legs(scenario, args.signals, args.seed, args.minutes)
    if len(legs) < args.signals:
        print("not all signals have been sent: run the same command again")
        return 1
    codes = {name: finish(scenario, name) for name in ("stopped", "whole") if not (args.folder / name / "model").exists()}
    wrong = [f"{name} ended with {code}" for name, code in codes.items() if code] or differences(scenario.folder)
    wrong += [f"leg {i} ended with {g.code}" for i, g in enumerate(legs, 1) if g.code != 75]
    print("equal" if not wrong else "\n".join(wrong))
    if args.table:
        put_table(args.table, table(scenario, legs, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
