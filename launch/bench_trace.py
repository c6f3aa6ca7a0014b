"""Where the time of a training step goes: the real Engine on random rows under torch.profiler.

    python launch/bench_trace.py --model preset:llama-3b --ds_config ds_configs/zero2_offload.json --optim adamw_split_8bit \\
        --micro_batch 4 --seq_len 4096 --checkpointing full [--documents 1] [--out DIR] [further flags of launch/train.py]

Model and Engine are made as launch/train.py makes them. After some steps without profiler (their time is reported as well: the
profiler costs some), `--steps` consecutive steps are recorded, and one whole period of them is taken apart: see trace_reading.py.
One JSON line; with `--out` also trace.md, trace.json (the line) and the trace itself (chrome://tracing).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import rounded, settled
from torch.profiler import ProfilerActivity, profile, record_function
from trace_reading import MARK, markdown, read, report

from bigtrain import data, ranks, train, zero
from bigtrain.config import ModelShape
from bigtrain.diagnostics.metrics import flops_formula
from bigtrain.engine import Engine
from bigtrain.models.source import config_from
from bigtrain.run import attention, capacity, failure, left_open, model_files, search
from bigtrain.run import job as jobs
from bigtrain.run.arguments import TrainArguments, parse


class Marked(Engine):
    """The Engine, with its three phases marked in the trace."""

    def __call__(self, *args: Any, **batch: Any) -> Any:
        with record_function(MARK + "forward"):
            return super().__call__(*args, **batch)

    def _backward(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        with record_function(MARK + "backward"):
            return super()._backward(loss, weight)

    def step(self) -> Any:
        with record_function(MARK + "step"):
            return super().step()


def arguments(argv: list[str]) -> tuple[argparse.Namespace, TrainArguments]:
    """This script's own arguments, and those of the training program with the rest of the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3b")
    parser.add_argument("--ds_config", required=True)
    parser.add_argument("--optim", default="adamw")
    parser.add_argument("--micro_batch", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--seq_len", type=int, default=4096)
    parser.add_argument("--checkpointing", choices=["none", "full"], default="full")
    parser.add_argument("--documents", type=int, default=1, help="documents packed into a row, of random lengths")
    parser.add_argument("--warmup", type=int, default=5, help="steps before; the last three are timed")
    parser.add_argument("--steps", type=int, default=3, help="steps recorded; the period after the first is taken apart")
    parser.add_argument("--out", type=Path)
    own, rest = parser.parse_known_args(argv)
    if own.warmup < 3 or own.steps < 3:
        parser.error("--warmup and --steps must be 3 or more")
    words = {
        "model_name_or_path": own.model,
        "train_data": __file__,  # neither is read: rows are made here
        "tokenizer_name_or_path": tempfile.gettempdir(),
        "output_dir": tempfile.gettempdir(),
        "ds_config": own.ds_config,
        "optim": own.optim,
        "per_device_train_batch_size": own.micro_batch,
        "gradient_accumulation_steps": own.accumulation,
        "seq_len": own.seq_len,
        "gradient_checkpointing": own.checkpointing == "full",
        "max_steps": own.warmup + own.steps,
    }
    return own, parse([f"--{name}={value}" for name, value in words.items()] + rest)


def make_job(args: TrainArguments, config: dict[str, Any]) -> jobs.Job:
    """What launch/train.py prepares from files, here without data."""
    model_config = config_from(args.model_name_or_path, args.trust_remote_code)
    seq_len = model_files.choose_seq_len(args, model_config)
    resolved = jobs.resolve(args, config, ModelShape.from_config(model_config), args.max_steps)
    run = resolved.run
    assert run.micro_batch and run.accumulation and args.max_steps
    rows = run.micro_batch * run.accumulation * ranks.world_size() * args.max_steps
    return jobs.Job(
        args=args,
        resolved=resolved,
        tokenizer=None,
        seq_len=seq_len,
        rows=None,
        eval_rows=None,
        steps=data.StepPlan(rows, run.micro_batch, run.accumulation, ranks.world_size(), args.max_steps),
        model_config=model_config,
        config_overrides={},
        resize_vocab_to=None,
    )


def packed_rows(rows: int, seq_len: int, vocab: int, documents: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random tokens as the data path packs them: positions from 0 in each document, no loss on a document's first token.

    Returns:
        input_ids, labels, position_ids, int64 [rows, seq_len].
    """
    ids = torch.randint(0, vocab, (rows, seq_len), generator=generator)
    positions, labels = torch.arange(seq_len).repeat(rows, 1), ids.clone()
    for row in range(rows):
        cuts = (torch.randperm(seq_len - 1, generator=generator)[: documents - 1] + 1).sort().values
        for start in [0, *cuts.tolist()]:
            positions[row, start:] = torch.arange(seq_len - start)
            labels[row, start] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def batches(own: argparse.Namespace, job: jobs.Job) -> list[list[dict[str, torch.Tensor]]]:
    """The micro batches of all steps, page-locked as a loader's are."""
    vocab = int(job.model_config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(ranks.rank())
    pin = torch.cuda.is_available()

    def one() -> dict[str, torch.Tensor]:
        made = packed_rows(job.steps.micro_batch, job.seq_len, vocab, own.documents, generator)
        return {name: t.pin_memory() if pin else t for name, t in made.items()}

    return [[one() for _ in range(job.steps.accumulation)] for _ in range(own.warmup + own.steps)]


def run(engine: Engine, own: argparse.Namespace, steps: list[Any], trace: Path) -> dict[str, Any]:
    """Train; record the last steps; returns times and memory."""
    times = []
    for micro_batches in steps[: own.warmup]:
        begin = time.perf_counter()
        engine.train_step(micro_batches)  # ends by reading the loss; a streamed update goes on into the next step
        times.append(time.perf_counter() - begin)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    recorded = []
    with profile(activities=kinds) if ranks.is_main() else contextlib.nullcontext() as prof:
        for micro_batches in steps[own.warmup :]:
            begin = time.perf_counter()
            engine.train_step(micro_batches)
            recorded.append(time.perf_counter() - begin)
        settled()
    if prof is not None:
        prof.export_chrome_trace(str(trace))
    memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"step_s": median(times[-3:]), "recorded_step_s": recorded, "gpu_allocated_bytes": memory}


def main(argv: list[str]) -> None:
    """Build, train, take apart, print."""
    train.tools_on_path()
    train.start_logging()
    own, args = arguments(argv)
    config = jobs.read_ds_config(args)
    zero.init_distributed(timeout_s=args.ddp_timeout)
    ranks.control_group()
    capacity.cap_gpu_memory(args.gpu_memory_cap)
    if args.ds_config == jobs.AUTO:
        args, config = search.choose(args)
    job = left_open.settle(make_job(args, config), capacity.hardware(args.gpu_memory_cap))
    jobs.check_engine(job)
    model, _ = jobs.build(job)
    flops = flops_formula(model, job.seq_len)
    engine = Marked(model, hang_s=None, **jobs.engine_arguments(job))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        found = run(engine, own, batches(own, job), trace)
        engine.close()
        if ranks.is_main():
            told = json.loads(trace.read_text(encoding="utf-8"))
            finish(own, {**about(own, args, job, flops, found), **report(read(told), 1)}, trace)
    failure.leave()


def about(own: argparse.Namespace, args: TrainArguments, job: jobs.Job, flops: Any, found: dict[str, Any]) -> dict[str, Any]:
    """What ran, and its speed without the profiler."""
    tokens = job.tokens_per_step // ranks.world_size()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "model": own.model,
        "ds_config": Path(own.ds_config).stem,
        "optim": job.resolved.run.optim,
        "micro_batch": job.steps.micro_batch,
        "accumulation": job.steps.accumulation,
        "seq_len": job.seq_len,
        "checkpointing": bool(job.resolved.run.gradient_checkpointing),
        "attention": attention.choose(args, job.model_config),
        "world_size": ranks.world_size(),
        "card": card or "cpu",
        "tokens_per_s_per_gpu": tokens / found["step_s"],
        "mfu": flops.mfu(tokens / found["step_s"], card),
        **found,
    }


def finish(own: argparse.Namespace, found: dict[str, Any], trace: Path) -> None:
    """Print the line; write the page, the line and the trace."""
    line = json.dumps(rounded(found))
    if own.out:
        own.out.mkdir(parents=True, exist_ok=True)
        batch = f"{found['micro_batch']}x{found['accumulation']}x{found['seq_len']}"
        name = f"{found['model'].split(':')[-1].replace('/', '-')}-{found['ds_config']}-{found['optim']}-{batch}-{own.checkpointing}"
        title = f"{name}: {found['tokens_per_s_per_gpu']:.0f} tokens/s on {found['card']} without the profiler"
        (own.out / f"{name}.md").write_text(markdown(title, found), encoding="utf-8")
        (own.out / f"{name}.json").write_text(line + "\n", encoding="utf-8")
        with gzip.open(own.out / f"{name}.trace.json.gz", "wb", compresslevel=1) as packed:
            packed.write(trace.read_bytes())
    print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
