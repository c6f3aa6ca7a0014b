"""The training engine: DeepSpeed's idiom, with nothing silent.

    engine = Engine(model, ds_config="ds_configs/zero3_offload.json", learning_rate=1e-4, total_steps=1000)
    loss = engine(**batch).loss; engine.backward(loss); engine.step()      # as with DeepSpeed; step() acts every `accumulation`
    result = engine.train_step(micro_batches)                             # the exact path: one global batch, token-exact loss

A step is forward, backward, step, in that order below. What is decided is in `settings`, what is judged in `guards`, how
gradients reach the optimizer in `reduction`, how ranks notice that they parted in `meeting` and `watch`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigtrain import agreement, buffers, evaluation, guards, ranks, settings, steps, zero
from bigtrain.assembly import assemble
from bigtrain.bypass import Origin
from bigtrain.checkpoint.native import Checkpoints
from bigtrain.errors import DataError, NonFiniteError, RanksDisagreeError
from bigtrain.guards import RankStep
from bigtrain.meeting import Point, meet, pack, unpack
from bigtrain.precision import keep_parameters_in_fp32, summary
from bigtrain.reduction import Reduction
from bigtrain.steps import Batch, EvalResult, StepResult
from bigtrain.watch import Watcher, Whereabouts

log = logging.getLogger(__name__)
_COUNTERS = ("global_step", "updates", "tokens", "data_position", "seed")


class Engine:
    """Trains one model under DeepSpeed.

    Args:
        model: from `build_model`, or any nn.Module. At stage 3 it should have been built under zero.Init.
        ds_config: path or mapping, DeepSpeed's own JSON.
        optimizer: a name of `bigtrain.optim.OPTIMIZERS`; wins over the ds_config's section. "adamw" if neither says.
        learning_rate, betas, eps, weight_decay: for the optimizer; from the ds_config where not given.
        lr_scheduler, warmup_steps, total_steps, lr_scheduler_kwargs: the schedule, a pure function of `global_step`; the first update is at the
            warm-up rate. Linear where nothing says, constant without total_steps.
        max_grad_norm: clip the global gradient norm; from the ds_config, else 1.0; 0 for no clipping.
        micro_batch, accumulation: samples a forward and rank, forwards a step; from the ds_config where not given.
        seed: recorded, and set for torch on every rank (plus the rank, so that dropout differs).
        keep_in_fp32: patterns of parameter names that stay fp32; works at stage 0, refused at stages 1 to 3.
        nonfinite_limit: stop after so many skipped steps in a row.
        agree_every: compare replicated state between ranks every so many steps; 0 for never.
        leaf_modules: classes whose modules gather all their parameters at once at stage 3; their inputs must carry gradients.
        count_targets: number of loss terms in a batch, for models that count otherwise than `steps.target_counter`.
        uniform_forward: promise that all ranks use the same parameters in every backward, to skip the check (0.2 ms each).
        trace_gradients: mark parameters whose local gradient is not finite, to name rank and parameter.
        hang_s: at stage 3, end with a report when no rank has moved for so long; None for no watcher.

    Raises:
        ConfigError, UsageError: before anything is built, on every rank alike.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        ds_config: str | Path | Mapping[str, Any],
        optimizer: str | None = None,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        lr_scheduler: str | None = None,
        warmup_steps: int | None = None,
        total_steps: int | None = None,
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        micro_batch: int | None = None,
        accumulation: int | None = None,
        seed: int = 42,
        keep_in_fp32: Sequence[str] = (),
        nonfinite_limit: int = 5,
        agree_every: int = 100,
        leaf_modules: Sequence[type] = (),
        count_targets: steps.CountTargets | None = None,
        uniform_forward: bool = False,
        trace_gradients: bool = True,
        hang_s: float | None = 600.0,
    ):
        zero.init_distributed()
        with ranks.together("reading the engine's settings"):
            self._settings = settings.settle(
                settings.read(ds_config),
                world_size=ranks.world_size(),
                optimizer=optimizer,
                learning_rate=learning_rate,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                lr_scheduler=lr_scheduler,
                warmup_steps=warmup_steps,
                total_steps=total_steps,
                lr_scheduler_kwargs=lr_scheduler_kwargs,
                max_grad_norm=max_grad_norm,
                micro_batch=micro_batch,
                accumulation=accumulation,
            )
            self._factor = self._settings.schedule()
            keep = keep_parameters_in_fp32(model, keep_in_fp32, self._settings.stage, self._settings.bf16)
        ranks.agree(agreement.digest(repr(self._settings)), "the engine's settings")
        for note in self._settings.notes if ranks.is_main() else ():
            log.warning(note)
        self.seed = seed
        self.data_position = 0
        self.tokens = 0
        self.global_step = 0
        self.updates = 0
        self.agree_every = agree_every
        self._nonfinite = guards.NonFiniteCount(nonfinite_limit)
        self._uniform = uniform_forward or ranks.world_size() == 1
        self.count_targets = count_targets or steps.target_counter(model)
        self._parts = assemble(model, self._settings, keep, leaf_modules, trace_gradients)
        self._ds = self._parts.ds
        self._names = self._parts.names
        self.checkpoints = Checkpoints(self)
        self._register(hang_s)
        torch.manual_seed(seed + ranks.rank())

    # ------------------------------------------------------------ construction

    def _register(self, hang_s: float | None) -> None:
        """Hooks: who entered which module, which gradients are sound, and which forward a loss came from."""
        self._forwards = 0  # through the engine, since the last step
        self._micro = 0  # backwards since the last step
        self._planned = self._settings.accumulation  # backwards until the next step
        self._origin = Origin(self.module, lambda: self.global_step)
        self._reduction = Reduction(self._ds, self._parts.params)
        self._flags = self._parts.flags
        self._flags.check = self._origin.check
        self._sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # this rank's share of the loss, and of the tokens
        self._set_boundary()
        module = self.module
        self._where: Whereabouts | None = None
        self._watcher: Watcher | None = None
        if self._settings.stage == 3 and hang_s is not None and self.world_size > 1:
            self._where = Whereabouts(module, not self._uniform and self.device.type == "cpu", lambda: self.global_step)
            self._watcher = Watcher(self._where, hang_s)
            self._watcher.start()

    # ------------------------------------------------------------ forward

    def __call__(self, *args: Any, **batch: Any) -> Any:
        """The model's forward, through DeepSpeed. Training passes must come this way."""
        self._set_boundary()
        self._at("forward", True, comparing=True)
        with self._origin.forward():
            output = self._ds(*args, **batch)
        self._at("after forward", False)
        if torch.is_grad_enabled() and self.module.training:
            self._forwards += 1
        return output

    # ------------------------------------------------------------ backward

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of the mean of `loss` over micro batches and ranks.

        Args:
            loss: scalar, from a forward through the engine.

        Returns:
            The loss, detached.

        Raises:
            BypassError: if no forward since the last step went through the engine, or this loss did not.
            RanksDisagreeError: if ranks do different things.
        """
        return self._backward(loss, 1.0 / (self._planned * self.world_size))

    def _backward(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Backward of `loss * weight`, summed over ranks; `weight` is the loss's share in the reported one."""
        if self._forwards == 0:
            self._origin.refuse(
                "backward() without a forward through the engine since the last step: call loss = engine(**batch).loss first."
            )
        if self._micro >= self._planned:
            self._origin.refuse(
                f"backward() number {self._micro + 1} of a step of {self._planned}: call engine.step() between."
            )
        if self._micro == 0:
            agreement.same_freezing(self._parts.frozen_map, self.global_step)
        self._sums[0].add_(loss.detach().double() * weight)
        # DeepSpeed takes the mean over ranks; what is wanted is the sum.
        scaled = loss.float() * (weight * self.world_size)
        if self._reduction.during_backward and not self._uniform:
            scaled.register_hook(self._agree_on_parameters)
        self._at("backward", True)
        with self._origin.backward():
            self._ds.backward(scaled, scale_wrt_gas=False)
        self._at("after backward", False)
        self._micro += 1
        return loss.detach()

    def _agree_on_parameters(self, _grad: torch.Tensor) -> None:
        """At the start of a backward: if ranks will use different parameters, reduce at its end, in one order (B50)."""
        if not agreement.same_parameters(self._reduction.used(), self._names, self.global_step, self._micro, self.stage):
            self._reduction.defer()

    # ------------------------------------------------------------ step

    def step(self) -> StepResult | None:
        """Update the weights once `accumulation` backwards are done; before that, None.

        Raises:
            BypassError: if no backward went through the engine since the last step.
            NonFiniteError: on all ranks, after `nonfinite_limit` skipped steps in a row.
            RanksDisagreeError: if ranks did different things, or hold different state.
            ModelError: if a parameter was frozen or unfrozen since construction.
        """
        if self._micro == 0:
            self._origin.refuse("step() without engine.backward(loss) since the last step: nothing to apply.")
        if self._micro < self._planned:
            return None
        self._at("step", True)
        verdict = guards.judge(self._tell(), self.global_step + 1, self._names)
        lr = self._set_lr()
        self.checkpoints.before_update()
        applied, norm = self._reduction.step(refuse=not verdict.apply)
        buffers.average_running_stats(self._parts.batchnorms)
        reason = verdict.reason
        if verdict.apply and not applied:
            reason = f"step {self.global_step + 1}: the norm of the reduced gradient is not finite although every rank's own is"
        return self._finish(verdict, lr, norm, applied, reason)

    def _tell(self) -> list[RankStep]:
        """Exchange what the ranks know. The one wait for the device in a step: DeepSpeed would wait here itself."""
        sound = torch.isfinite(self._flags.marks).all().double().reshape(1)
        loss, tokens, finite = torch.cat([self._sums, sound]).tolist()
        bad = guards.UNKNOWN if finite else self._flags.first()
        order = self._reduction.order_hash
        packed = (pack(loss), int(tokens), agreement.fold(bad, order))
        rows = meet(Point.STEP, self.global_step, self._micro, packed)
        told = [RankStep(unpack(a), b, *agreement.unfold(c)) for a, b, c in rows]
        if len({row.order for row in told}) > 1:
            raise RanksDisagreeError(
                f"step {self.global_step + 1}: ranks reduced the same parameters in different orders: gradients are mixed. "
                "Run the model's modules in the same order on every rank."
            )
        return told

    def _finish(self, verdict: guards.Verdict, lr: float, norm: float, applied: bool, reason: str) -> StepResult:
        """Count, report, compare, and stop if it must."""
        self.global_step += 1
        self.updates += applied
        self.tokens += verdict.tokens
        stop = self._nonfinite.note(applied)
        self._forwards = self._micro = 0
        self._planned = self._settings.accumulation
        self._sums.zero_()
        self._flags.clear()
        self._set_boundary()
        self._at("between steps", False)
        if not applied:
            log.error(
                "%s. Step skipped: weights and optimizer state are unchanged (%d in a row).", reason, self._nonfinite.in_a_row
            )
        if stop:
            count = self._nonfinite.in_a_row
            raise NonFiniteError(
                f"{count} steps in a row were not finite; the last: {reason}. The weights are those of step "
                f"{self.global_step - count}. Look at the data and the learning rate ({lr:.3g}).",
                self.global_step,
                count,
            )
        if self.agree_every and self.global_step % self.agree_every == 0:
            self.check_agreement()
        return StepResult(self.global_step, verdict.loss, lr, norm, verdict.tokens, applied, self._nonfinite.total, reason)

    def _set_lr(self) -> float:
        """The schedule is a pure function of the step, set right before the update: the rate logged is the rate used."""
        factor = self._factor(self.global_step)
        for group, peak in zip(self._ds.optimizer.param_groups, self._parts.base_lrs):
            group["lr"] = peak * factor
        return self._parts.base_lrs[0] * factor

    def check_agreement(self) -> None:
        """Compare replicated parameters and buffers, counters, rate and data position between ranks.

        Raises:
            RanksDisagreeError: on all ranks, naming what differs.
        """
        counters = {"global_step": self.global_step, "updates": self.updates, "data position": self.data_position}
        agreement.same_state(self.module, {**counters, "learning rate": self.lr}, self.global_step)

    # ------------------------------------------------------------ the exact path

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One global batch: forward, backward and step so that the gradient is that of the mean over all its target tokens.

        The gradient is d(sum of token losses / number of target tokens)/dw over all micro batches and ranks, whatever the
        split. The model's own loss must be the mean over its targets.

        Args:
            micro_batches: this rank's part, the same number on every rank.

        Raises:
            DataError: on every rank, if the global batch holds no target at all.
        """
        if self._micro:
            self._origin.refuse("train_step() in the middle of an accumulation: finish it with engine.step() first.")
        counts = [self.count_targets(batch) for batch in micro_batches]
        told = meet(Point.BATCH, self.global_step, 0, (len(counts), sum(counts)))
        if len({row[0] for row in told}) > 1:
            numbers = {r: row[0] for r, row in enumerate(told)}
            raise RanksDisagreeError(f"train_step(): ranks were given different numbers of micro batches: {numbers}", numbers)
        total = sum(row[1] for row in told)
        if total == 0 or not micro_batches:
            raise DataError(
                f"step {self.global_step + 1}: no target token in the global batch ({self.world_size} ranks x {len(counts)} "
                "micro batches): every label is -100. Check the chat template's answers, seq_len and the truncation side."
            )
        self._planned = len(micro_batches)
        self._sums[1] += sum(counts)
        for batch, count in zip(micro_batches, counts):
            batch = batch if count else steps.without_targets(batch)
            loss = steps.loss_of(self(**steps.move(batch, self.device, self.dtype)))
            self._backward(loss, count / total)
        result = self.step()
        assert result is not None
        return result

    def evaluate(self, batches: Iterable[Batch], limit_s: float | None = 120.0) -> EvalResult:
        """Mean loss over all targets of all ranks' batches, without gradients; every module's mode is restored.

        Every rank calls it. A rank with fewer batches than another repeats its last one with weight zero, so that all run
        the same forwards.

        Args:
            batches: this rank's batches; at least one.
            limit_s: longest wait for the other ranks at the start.

        Raises:
            RanksDisagreeError: if not every rank calls it, or one has no batch at all.
        """
        return evaluation.evaluate(self, batches, limit_s)

    # ------------------------------------------------------------ saving

    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        state: dict[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        wait: bool = True,
    ) -> Path:
        """Write `directory/<tag>` ("checkpoint-<global_step>"): all that training needs to go on, on any number of ranks.

        Every rank calls it, between steps. See `checkpoint.native.Checkpoints.save` for arguments and errors, and
        checkpoint/FORMAT.md for what is written.
        """
        return self.checkpoints.save(
            Path(directory).absolute(), tag, state or {}, keep_last=keep_last, keep_every=keep_every, wait=wait
        )

    def load_checkpoint(self, directory: str | Path, tag: str | int | None = None, trust: bool = False) -> dict[str, Any]:
        """Go on from a checkpoint; returns the `state` given to `save_checkpoint`.

        Args:
            directory: the folder that holds checkpoints, or (without `tag`) one checkpoint.
            tag: a step or a folder name; None for the newest whole one.
            trust: for folders written by `save_deepspeed_checkpoint`; see `checkpoint.deepspeed_format.load`.

        Raises:
            CheckpointError: see `checkpoint.native.Checkpoints.load`.
        """
        from bigtrain.checkpoint import deepspeed_format, native

        root = Path(directory).absolute()
        if native.is_native(root, tag):
            return self.checkpoints.load(root, tag)
        return deepspeed_format.load(self, root, None if tag is None else str(tag), trust)

    def save_deepspeed_checkpoint(
        self, directory: str | Path, tag: str | None = None, state: dict[str, Any] | None = None
    ) -> Path:
        """Write DeepSpeed's own layout, for tools that need it; blocks, and loads at the same number of ranks only."""
        from bigtrain.checkpoint import deepspeed_format

        return deepspeed_format.save(self, directory, tag, state or {})

    def export(self, directory: str | Path, dtype: str = "bfloat16", tokenizer: Any = None) -> Path:
        """Write the model as a Hugging Face folder; all ranks call it."""
        from bigtrain import weights

        meet(Point.EXPORT, self.global_step, 0, limit_s=120.0)
        weights.export_model(self.module, Path(directory), dtype=dtype, tokenizer=tokenizer)
        return Path(directory)

    def run_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside weights, optimizer and random state."""
        s = self._settings
        counters = {name: getattr(self, name) for name in _COUNTERS}
        skips = {"skipped": self._nonfinite.total, "skipped_in_a_row": self._nonfinite.in_a_row}
        run = {"world_size": self.world_size, "stage": s.stage, "config": s.config, "deepspeed_steps": self._ds.global_steps}
        return {**counters, **skips, **run, "optimizer": s.optimizer, "schedule": s.scheduler, "bf16": s.bf16}

    def set_run_state(self, run: dict[str, Any]) -> None:
        """Restore the counters of `run_state`."""
        for name in _COUNTERS:
            setattr(self, name, run[name])
        self._nonfinite.total, self._nonfinite.in_a_row = run["skipped"], run["skipped_in_a_row"]

    # ------------------------------------------------------------ small things

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing, for loops written for DDP: accumulation is counted by the engine alone (ZeRO refuses no_sync)."""
        yield

    def train(self, mode: bool = True) -> None:
        """Set the module's mode, as on nn.Module."""
        self.module.train(mode)

    def eval(self) -> None:
        """Set evaluation mode, as on nn.Module."""
        self.module.eval()

    def close(self) -> None:
        """Finish a save in flight, end the watcher thread and release DeepSpeed's hooks."""
        if self._watcher is not None:
            self._watcher.stop()
        try:
            self.checkpoints.wait()
        finally:
            self._ds.destroy()

    def _at(self, place: str, inside: bool, comparing: bool = False) -> None:
        if self._where is not None:
            self._where.at(place, inside)
            self._where.comparing = comparing

    def _set_boundary(self) -> None:
        self._ds.set_gradient_accumulation_boundary(self._micro + 1 >= self._planned)

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine, for what this class does not offer; its forward, backward and step are not to be called."""
        return self._ds

    @property
    def between_steps(self) -> bool:
        """True if no gradient is being accumulated."""
        return self._micro == 0

    @property
    def module(self) -> torch.nn.Module:
        """The model itself: for inspection and generation, not for training passes."""
        return self._ds.module

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self._ds.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that forward uses."""
        return torch.bfloat16 if self._settings.bf16 else torch.float32

    @property
    def rank(self) -> int:
        """Global rank."""
        return ranks.rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return ranks.world_size()

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return self._settings.stage

    @property
    def micro_batch(self) -> int:
        """Samples a forward and rank."""
        return self._settings.micro_batch

    @property
    def accumulation(self) -> int:
        """Forwards a step."""
        return self._settings.accumulation

    @property
    def lr(self) -> float:
        """The learning rate of the next update, of the first parameter group."""
        return self._parts.base_lrs[0] * self._factor(self.global_step)

    def summary(self) -> dict[str, Any]:
        """What runs here, for the log and the report: stage, batch, optimizer, schedule, dtypes."""
        return summary(self._settings, self.world_size, self.module, self._reduction)
