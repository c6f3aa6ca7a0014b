"""The training program, top to bottom: arguments, config, data, model, engine, loop, export, report.

`main` is what launch/train.py runs, and `python -m bigtrain.train` where launch/ is not at hand. Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 does not fit, 75 stopped on
request and resumable (Ctrl-C or SIGTERM with --save_steps).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigtrain.errors import BigtrainError, StoppedError, UsageError
from bigtrain.hosts import launcher
from bigtrain.plan.room import WARNING_SHARE
from bigtrain.run import failure
from bigtrain.stopping import StopSignal, end_process, open_what_is_closed
from bigtrain.versions import missing_package

logger = logging.getLogger("bigtrain")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code."""
    open_what_is_closed()
    words = list(sys.argv[1:] if argv is None else argv)
    tools_on_path()
    with StopSignal() as stop:
        launcher.watch(stop)
        try:
            from bigtrain.run.arguments import parse

            start_logging()
            args = parse(words)
            from bigtrain.meeting import naming_the_lost

            with naming_the_lost():
                train(args, stop)
            return 0
        except Exception as error:
            stop.over = True
            code = failure.report(error)
            failure.tell_others(error)
            return code
        finally:
            failure.leave()


def train(args: Any, stop: StopSignal) -> dict[str, Any]:
    """One run; returns its summary. Every rank calls it with the same arguments."""
    from bigtrain import ranks, watch, zero
    from bigtrain.diagnostics.metrics import flops_formula
    from bigtrain.engine import Engine, steps
    from bigtrain.models import hub
    from bigtrain.run import capacity, disk, left_open, preflight, restart, sameness, search
    from bigtrain.run import job as jobs
    from bigtrain.run.runfolder import RunFolder
    from bigtrain.run.shortage import Explained

    config = jobs.read_ds_config(args)  # every fault of the file, before anything starts
    with stop.leaving_at_once():
        zero.init_distributed(timeout_s=args.ddp_timeout, words=sys.argv[1:])
        ranks.control_group()
    ranks.agree(asdict(args), "the arguments")
    watch.begin(args.hang_limit, args.output_dir)
    hub.look_for(args.model_name_or_path, args.tokenizer_name_or_path)
    sameness.refuse_different(args, config)
    args = restart.after_restart(args)
    if not args.no_preflight:
        preflight.check(args.output_dir, args.dataloader_num_workers)
    places = check_places()
    capacity.cap_gpu_memory(args.gpu_memory_cap)
    folder = RunFolder(args.output_dir, second=args.copy_checkpoints_to)
    ranks.main_decides(
        lambda: folder.check(resume=args.resume_from_checkpoint, overwrite=args.overwrite_output_dir, reads=args.reads),
        "checking output_dir",
    )
    resume, reached = ranks.main_decides(lambda: folder.start_point(args.resume_from_checkpoint), "looking for a checkpoint")
    asked = args
    if asked.ds_config == jobs.AUTO:
        args, config = search.choose(args)
    hardware = capacity.hardware(args.gpu_memory_cap)
    job = left_open.settle(jobs.prepare(args, config, resume), hardware, resume)
    layout = capacity.plan_of(job, hardware)
    planned = None if args.no_plan else capacity.check_fit(layout, hardware)  # before the data is tokenised, for hours maybe
    job = search.named_auto(jobs.with_data(job, config, reached), asked)
    jobs.check_engine(job)
    ranks.main_decides(lambda: disk.check(job, folder, reached[0]), "looking at the disk")
    with folder.replacing(), Explained(layout, hardware, folder) as explained:
        ranks.main_decides(lambda: folder.open(resume=args.resume_from_checkpoint), "opening output_dir")
        sameness.refuse_split_output(folder.root, saves=args.saves)
        ranks.main_decides(lambda: announce(job, folder, places, planned), "writing run.json")
        model, isolation = jobs.build(job)
        explained.model, explained.phase = steps.shifting(model), "starting the engine"
        engine = explained.engine = Engine(model, hang_s=args.hang_limit, **jobs.engine_arguments(job))
        engine.checkpoints.tokenizer, engine.checkpoints.copy_to = job.tokenizer, folder.second
        if resume is not None:
            job = going_on(job, engine, folder, resume, reached)
        with ranks.together("opening loaders and trackers"):
            run = Run(job, engine, folder, stop, flops_formula(model, job.seq_len), places, isolation.document_bounds)
        try:
            return run.finish(run.loop())
        except Exception as error:
            run.failed(error)
            raise
        finally:
            run.close()
            engine.close()


def going_on(job: Any, engine: Any, folder: Any, resume: Path, reached: tuple[int, int]) -> Any:
    """Load the checkpoint `resume`, or its copy or the one before it if its data is damaged and the user named none; the job from there on."""
    source = folder.load_from(resume, job.args.resume_from_checkpoint)
    job = job.going_on(engine.load_checkpoint(source), engine.global_step, engine.data_position, reached)
    logger.info(
        "resumed from %s at step %d, row %d", engine.checkpoints.loaded or resume, engine.global_step, engine.data_position
    )
    return job


class Run:
    """The loop and what goes with it: loaders, rows, progress, evaluation, checkpoints."""

    def __init__(
        self, job: Any, engine: Any, folder: Any, stop: StopSignal, flops: Any, places: Sequence[Any], document_bounds: bool
    ):
        from bigtrain import data, ranks
        from bigtrain.diagnostics.gpu_memory import GpuMemory, Thrash
        from bigtrain.diagnostics.metrics import ProcessMemory, RowLog, StepClock
        from bigtrain.diagnostics.progress import Progress, Trackers, open_trackers
        from bigtrain.run.saving import Saving

        args = job.args
        self.job, self.engine, self.folder, self.stop = job, engine, folder, stop
        self.args, self.flops, self.card = args, flops, places[0].device
        where: dict[str, Any] = {"rank": ranks.rank(), "world_size": ranks.world_size(), "document_bounds": document_bounds}
        workers = args.dataloader_num_workers
        start = self.start = engine.global_step
        order = data.SampleOrder(len(job.rows), args.order_seed)
        self.loader = data.StepLoader(job.rows, order, job.steps, start_step=start, num_workers=workers, **where)
        self.eval_loader = None
        if job.eval_rows is not None:
            plan = data.plan_eval(
                len(job.eval_rows), args.per_device_eval_batch_size or job.steps.micro_batch, where["world_size"]
            )
            self.eval_loader = data.EvalLoader(job.eval_rows, plan, num_workers=workers, **where)
        self.clock, self.memory, self.main = StepClock(), ProcessMemory(), ranks.is_main()
        self.gpu, self.thrash = GpuMemory(), Thrash()
        kept = {**job.data_told, **job.eval_told, "leaf_blocks": job.leaf_blocks}
        self.saving = Saving(args, engine, job.steps, folder.root, kept)
        self.ended, self.trackers = False, Trackers({})
        if self.main:
            self.rows = RowLog(folder.root / "metrics.jsonl", keep_to_step=start)
            self.evals = RowLog(folder.root / "eval.jsonl", keep_to_step=start)
            self.saving.evaluations = self.evals.rows
            self.trackers = open_trackers(args.trackers, folder.root, asdict(args), run_name=args.run_name, first_step=start)
            folder.update_run(flops_formula=str(flops), engine=engine.summary(), resumed_at_step=start or None)
        self.evaluated_step = -1  # of eval.jsonl, once all ranks have one of these
        self.progress = Progress(
            total_steps=job.steps.steps,
            first_step=start,
            due=lambda step: self.saving.due("logging", step),
            enabled=self.main,
            bar=not args.disable_tqdm,
        )

    def loop(self) -> str:
        """All steps and evaluations; returns how it ended."""
        from bigtrain import ranks

        engine = self.engine
        self.evaluated_step = ranks.main_decides(lambda: self.evals.last_step, "reading eval.jsonl")
        self.stop.trains = True
        if engine.global_step >= self.job.steps.steps:
            logger.info("all %d steps are done before: nothing is left to train; more with --max_steps N", self.job.steps.steps)
        if self.evaluate():  # a run that was stopped after the step that this one goes on from had no time for it
            return self.stopped(engine.global_step)
        self.clock.lap()
        for micro_batches in self.loader:
            result = engine.train_step(micro_batches)
            engine.data_position = self.loader.position(result.step)
            if self.record(result) or self.evaluate():
                return self.stopped(result.step)
            self.saving.prepare()
            if self.saving.due():
                self.save()
        if self.evaluate(last=True) and self.saving.resumable:
            return self.stopped(engine.global_step)
        return "finished"

    def record(self, result: Any) -> bool:
        """One row for the step just made; True if any rank was asked to stop. The one exchange a step that the loop adds."""
        from bigtrain import ranks

        host, pss = self.memory.rss_bytes(), self.memory.pss_bytes()
        said = [self.memory.share(), self.stop.requested is not None, host, pss, *self.gpu.since_last()]
        share, *most = ranks.max_each([float(v) for v in said])
        stop, host, pss, allocated, reserved, used, retries = map(int, most)
        if not self.main:
            return bool(stop)
        seconds = self.clock.lap()
        tokens = self.job.tokens_per_step
        row = {
            "step": result.step,
            "epoch": self.engine.data_position / self.job.steps.n_rows,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": tokens,
            "target_tokens": result.tokens,
            "step_time_s": seconds,
            "tokens_per_s": tokens / seconds,
            "mfu": self.flops.mfu(tokens / seconds / ranks.world_size(), self.card),
            "gpu_allocated_bytes": allocated,
            "gpu_reserved_bytes": reserved,
            "gpu_used_bytes": used,
            "gpu_alloc_retries": retries,
            "host_rss_bytes": host,
            "host_pss_bytes": pss,
            "host_memory_used": share,
            "host_memory_warning": share >= WARNING_SHARE,
            "skipped": not result.applied,
        }
        self.rows.write(row)
        self.folder.forget_the_one_before()
        self.progress.step(row)
        if (words := self.thrash.words(result.step, retries)) is not None:
            self.progress.note(words)
        self._track(row, result.step)
        return bool(stop)

    def evaluate(self, last: bool = False) -> bool:
        """Loss over the evaluation data, on all ranks, where it is due after this step and not known yet; True if a stop cut it short."""
        step = self.engine.global_step
        if self.eval_loader is None or self.evaluated_step == step or not (last or self.saving.due("eval")):
            return False
        begin = time.perf_counter()
        try:
            with self.clock.paused("evaluation"):
                result = self.engine.evaluate(self.eval_loader, stop=lambda: self.stop.requested is not None)
        except StoppedError:
            self.progress.note(f"the evaluation after step {step} was cut short by a stop")
            return True
        self.evaluated_step = step
        if self.main:
            seconds = time.perf_counter() - begin
            self.evals.write({"step": step, "eval_loss": result.loss, "eval_tokens": result.tokens, "eval_time_s": seconds})
            self._track({"eval/loss": result.loss}, step)
            self.progress.note(f"evaluation after step {step}: loss {result.loss:.4f} over {result.tokens:,} target tokens")
        return False

    def save(self) -> None:
        """Save this step."""
        with self.clock.paused("saving"):
            told = self.saving.save()
        self.progress.note(told)

    def stopped(self, step: int) -> str:
        """Asked to stop: save if this run saves, then leave."""
        why = self.stop.requested or "another rank's signal"
        if not self.saving.resumable:
            without = "--save_only_model was given" if self.args.saves else "--save_steps was not given"
            return f"stopped by {why} after step {step}; no checkpoint, because {without}"
        if self.saving.step != step:
            self.save()
        if (lost := self.saving.lost()) is not None:
            raise lost
        model = f"bigtrain export {shlex.quote(str(self.folder.root / f'checkpoint-{step}'))} MODEL_DIR"
        return f"stopped by {why} after step {step}; continue with --resume_from_checkpoint auto; for a model now: {model}"

    def finish(self, outcome: str) -> dict[str, Any]:
        """Last checkpoint, the exported model, the summary, the report.

        Raises:
            StoppedError: the run was stopped; nothing is exported then. CheckpointError: the last one could not be saved, the model was.
        """
        if outcome == "finished":
            lost = self.saving.last(self.save)
            if self.is_exported():
                logger.info("%s is there: nothing was trained since it was written", self.folder.root / "model")
            else:
                self.export()
            if lost is not None:
                raise lost
        self.progress.close()
        summary = self._summarise(outcome) if self.main else {}
        if outcome != "finished":
            if self.saving.resumable:
                raise StoppedError(outcome)
            raise BigtrainError(outcome)
        return summary

    def is_exported(self) -> bool:
        """True if OUT/model is the one that this run would write: a finished run that was resumed, with nothing left to train."""
        from bigtrain import ranks

        step = (self.saving.best() if self.args.load_best_model_at_end else None) or self.engine.global_step
        return self.engine.global_step == self.start and ranks.main_decides(
            lambda: self.folder.has_model(step, self.args.resume_from_checkpoint), "looking for the exported model"
        )

    def export(self) -> None:
        """Write OUT/model, of the best step where that was asked for."""
        if self.args.load_best_model_at_end:
            self.saving.load_best()
        if not self.args.no_export:
            self.engine.export(self.folder.root / "model", tokenizer=self.job.tokenizer)
            if self.main:
                self.folder.update_run(model_step=self.engine.global_step)

    def failed(self, error: Exception) -> None:
        """Write down how it ended; `python -m bigtrain.diagnostics.report OUT` shows what there is."""
        from bigtrain.run.runfolder import now

        self.engine.checkpoints.failure()  # of a save in flight: it has been said, and must not hide what ended the run
        if isinstance(error, UsageError) and self.engine.global_step > self.start:
            error.exit_code = BigtrainError.exit_code  # 2 says that nothing was trained
        if self.main and not self.ended:
            self.rows.settle()
            self.evals.settle()
            with contextlib.suppress(
                BigtrainError, OSError
            ):  # a full disk, or a limit on open files, may be what ended the run
                self.folder.update_run(
                    outcome=f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", ended=now()
                )

    def _summarise(self, outcome: str) -> dict[str, Any]:
        from bigtrain.diagnostics.metrics import read_rows, summarise
        from bigtrain.diagnostics.report import flatten, write_report
        from bigtrain.run.runfolder import now

        self.rows.settle()
        self.evals.settle()
        rows = self.rows.rows()
        summary = summarise(rows, self.clock.totals_s, self.start)
        self.folder.update_run(summary=summary, outcome=outcome, ended=now())
        self.ended = True
        if rows:
            try:
                page = f"report: {write_report(self.folder.root)}"
            except (OSError, ImportError) as error:  # the run itself is done
                page = f"no report: {missing_package(error) or error}; when that is mended: python -m bigtrain.diagnostics.report {self.folder.root}"
            ends = [f"  {name}: {value}" for name, value in flatten(summary)]
            if (evaluated := read_rows(self.folder.root / "eval.jsonl"))[-1:]:
                ends.append(f"  last_eval_loss: {evaluated[-1]['eval_loss']:.4g}")
            if outcome == "finished" and not self.args.no_export:
                ends.append(f"model: {self.folder.root / 'model'}")
            logger.info("%s\n%s", "\n".join(ends), page)
        return summary

    def _track(self, numbers: Mapping[str, Any], step: int) -> None:
        from bigtrain.diagnostics.progress import loggable

        self.trackers.log(loggable(numbers), step)

    def close(self) -> None:
        """Let go of workers and files."""
        self.loader.close()
        if self.eval_loader is not None:
            self.eval_loader.close()
        self.progress.close()
        self.trackers.close()
        if self.main:
            self.rows.close()
            self.evals.close()


# ---------------------------------------------------------------- before the first step


def check_places() -> list[Any]:
    """Where every rank runs; refuses two ranks on one card."""
    from bigtrain import ranks
    from bigtrain.hosts import placement

    places = ranks.all_gather_object(placement.this_place())
    placement.refuse_shared_cards(places)
    conflict = placement.scheduler_conflict(os.environ)
    if ranks.is_main():
        if conflict:
            logger.warning("%s", conflict)
        for place in places:
            logger.info("%s", place)
    return places


def announce(job: Any, folder: Any, places: Sequence[Any], planned: Mapping[str, Any] | None) -> None:
    """Write down what is about to run: decisions, plan, versions; and say of it what a user cannot know."""
    import torch

    from bigtrain.run.beginning import story
    from bigtrain.run.runfolder import now
    from bigtrain.versions import versions

    resolved = job.resolved
    backend = torch.distributed.get_backend()
    logger.info("%d rank%s over %s", len(places), "s" * (len(places) != 1), backend)
    for level, text in story(resolved, folder.root):
        logger.log(level, "%s", text)
    logger.info("%s", job.steps.describe())
    decided_by = {d.path: f"{d.source}: {d.reason}" for d in resolved.decisions}
    # DeepSpeed and the linter pass over names that begin with an underscore, so the file still runs as it is.
    folder.write_json("ds_config.resolved.json", {**resolved.config, "_decided_by": decided_by})
    folder.update_run(
        command=shlex.join(sys.argv),
        arguments=asdict(job.args),
        versions=versions(),
        world_size=len(places),
        backend=backend,
        device=places[0].device,
        placement=[asdict(p) for p in places],
        decisions=[d.__dict__ for d in resolved.decisions],
        problems=[p.to_dict() for p in resolved.problems],
        steps=job.steps.describe(),
        planned=planned,
        started=now(),
        process=folder.process(),
        outcome="running",  # that of an earlier start of this run does not stand for this one
    )


def start_logging() -> None:
    """INFO on rank 0, warnings with the rank's number elsewhere; libraries speak up from WARNING on."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(format="%(message)s" if rank == "0" else f"[rank {rank}] %(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO if rank == "0" else logging.WARNING)


def tools_on_path() -> None:
    """Put this Python's own bin folder on PATH: building CPU Adam needs the `ninja` that was installed beside it."""
    own = str(Path(sys.executable).parent)
    if own not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = own + os.pathsep + os.environ.get("PATH", "")


# SuperOffload's worker processes import this file again.
if __name__ == "__main__":
    end_process(main())
