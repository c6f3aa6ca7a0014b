"""The training engine: DeepSpeed's idiom, with nothing silent.

    engine = Engine(model, ds_config="ds_configs/zero3_offload.json", learning_rate=1e-4, total_steps=1000)
    loss = engine(**batch).loss; engine.backward(loss); engine.step()      # as with DeepSpeed; step() acts every `accumulation`
    result = engine.train_step(micro_batches)                             # the exact path: one global batch, token-exact loss

A step is forward, backward, step, in that order below. What is decided is in `settings`, what is judged in `guards`, how
gradients reach the optimizer in `reduction`, how ranks notice that they parted in `meeting`, and that nothing moves in `watch`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigtrain import guards, meeting, ranks, watch, weights, zero
from bigtrain.checkpoint import deepspeed_format
from bigtrain.checkpoint.native import Checkpoints
from bigtrain.config import Resolved, RunValues
from bigtrain.engine import agreement, evaluation, settings, steps
from bigtrain.engine.accumulation import Accumulation
from bigtrain.engine.assembly import assemble
from bigtrain.engine.branches import Branches
from bigtrain.engine.bypass import Origin, make_fit
from bigtrain.engine.misuse import NotCopied, knows_its_arguments
from bigtrain.engine.precision import summary
from bigtrain.engine.steps import Batch, EvalResult, StepResult
from bigtrain.hosts import launcher
from bigtrain.meeting import Point, meet, naming_the_lost
from bigtrain.models.kept import kept_names
from bigtrain.optim.schedules import GroupRates
from bigtrain.whereabouts import HERE

log = logging.getLogger(__name__)


class Engine(NotCopied):
    """Trains one model under DeepSpeed. Every rank makes one with the same arguments, and calls it alike.

    Args:
        model: from `build_model`, or any nn.Module that nothing wraps. At stage 3 `build_model` spares each rank the whole model.
        ds_config: path, preset name or mapping, DeepSpeed's own JSON; it is linted, and every "auto" filled in.
        optimizer: a key of `bigtrain.optim.OPTIMIZERS`; wins over the ds_config's section. "adamw" if neither says.
        learning_rate, betas, eps, weight_decay: for the optimizer; from the ds_config where None.
        lr_scheduler, warmup_steps, total_steps, lr_scheduler_kwargs: the schedule, a pure function of `global_step`; see
            `bigtrain.optim.schedule`. "linear" if nothing says; constant after the warm-up without total_steps. Or a function as LambdaLR's.
        max_grad_norm: global norm to clip gradients at; 0: no clipping. None: from the ds_config, else 1.0.
        micro_batch, accumulation: samples per forward and rank, forwards per step; from the ds_config where None.
        offload_gradients: share of them, 0 to 1, that leaves the GPU in backward: one rank, stage 2, adamw_split on the host.
        seed: kept in checkpoints; torch is seeded with it plus the rank, so that dropout differs between ranks.
        keep_in_fp32: patterns of parameter names that stay fp32: stage 0 only.
        nonfinite_limit: end the run after so many skipped steps in a row.
        agree_every: steps between comparisons of replicated state over the ranks; 0: never.
        leaf_modules: classes whose modules gather all their parameters at once at stage 3; an input of theirs is given a gradient if none has.
        count_targets: from a batch to the number of terms in its mean loss, for models that `steps.target_counter` counts wrong.
        uniform_forward: promise that all ranks use the same parameters in every backward, to skip the check (0.2 ms each).
        trace_gradients: mark parameters whose local gradient is not finite, so that rank and parameter are named.
        hang_s: seconds without progress on any rank after which all end, with a report in hang/ beside the checkpoints; by
            default learned from the steps; None: no watch.

    Attributes:
        settings: what was decided between the ds_config and the arguments.
        global_step, updates, tokens: optimizer steps done; those not skipped; target tokens trained on, over all ranks.
        data_position: how far the data is used up, in the caller's own unit: the caller sets it, checkpoints keep it.
        checkpoints: the saves and loads of this engine (`checkpoint.native.Checkpoints`).

    Raises:
        ConfigError, UsageError: before anything is built, on every rank alike.
        ModelError: the model is of another stage or dtype than the ds_config, or has nothing to train.
    """

    @knows_its_arguments
    def __init__(
        self,
        model: torch.nn.Module,
        *,
        ds_config: str | Path | Mapping[str, Any] | Resolved,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        lr_scheduler: str | Callable[[int], float] | None = None,
        warmup_steps: int | None = None,
        total_steps: int | None = None,
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = None,
        micro_batch: int | None = None,
        accumulation: int | None = None,
        offload_gradients: float = 0.0,
        seed: int = 42,
        keep_in_fp32: Sequence[str] = (),
        nonfinite_limit: int = 5,
        agree_every: int = 100,
        leaf_modules: Sequence[type] = (),
        count_targets: steps.CountTargets | None = None,
        uniform_forward: bool = False,
        trace_gradients: bool = True,
        hang_s: watch.Limit | None = watch.LEARNED,
    ):
        zero.init_distributed()
        with ranks.together("reading the engine's settings"):
            make_fit(model)
            named, own_factor = settings.schedule_of(lr_scheduler, warmup_steps, lr_scheduler_kwargs)
            beta1, beta2 = settings.pair_of(betas)
            run = RunValues(
                optim=optimizer, learning_rate=learning_rate, adam_beta1=beta1, adam_beta2=beta2, adam_epsilon=eps,
                weight_decay=weight_decay, lr_scheduler_type=named, warmup_steps=warmup_steps, total_steps=total_steps,
                max_grad_norm=max_grad_norm, micro_batch=micro_batch, accumulation=accumulation,
            )  # fmt: skip
            settings.refuse_other_kinds(run, seed)
            world, device = ranks.world_size(), ranks.device().type
            config, notes = settings.read(
                ds_config, run, world_size=world, device=device, model_config=getattr(model, "config", None)
            )
            self.settings = settings.settle(
                config,
                run,
                world_size=world,
                device=device,
                scheduler_kwargs=lr_scheduler_kwargs,
                offload_gradients=offload_gradients,
            )
            factor = self.settings.schedule(own_factor)
            keep = kept_names(model, keep_in_fp32, self.settings.stage, self.settings.bf16)
        ranks.agree(agreement.digest((self.settings, hang_s, factor(0))), "the engine's settings")
        launcher.watch()
        watch.begin(hang_s)
        for note in [*notes, *self.settings.notes] if ranks.is_main() else ():
            log.warning(note)
        self.seed, self.agree_every = seed, agree_every
        self.global_step = self.updates = self.data_position = self.tokens = 0
        self.nonfinite = guards.NonFiniteCount(nonfinite_limit)
        self._uniform = uniform_forward or ranks.world_size() == 1
        self.count_targets = count_targets or steps.target_counter(model)
        self._parts = assemble(model, self.settings, keep, leaf_modules, trace_gradients)
        self._ds, self._reduction = self._parts.ds, self._parts.reduction
        self._rates = GroupRates(self._ds.optimizer, factor)
        self.checkpoints = Checkpoints(self)
        self._parts.writes.before = self.checkpoints.before_update
        self._register()
        torch.manual_seed(seed + ranks.rank())

    def _register(self) -> None:
        """Hooks: which modules ranks enter, which gradients are sound, and which forward a loss came from."""
        self._since = Accumulation(self.settings.accumulation, self.device)
        traced = bool(self._parts.flags.handles)
        self._origin = Origin(self._ds, lambda: self.global_step, lambda: self._since.backwards > 0, traced)
        self._parts.flags.check = self._origin.check
        self._branches = Branches(self.module, self.stage, self._uniform, lambda: self.global_step)
        watch.names_modules(self.module)

    # ------------------------------------------------------------ forward

    def __call__(self, *args: Any, **batch: Any) -> Any:
        """The model's forward, through DeepSpeed. Training passes must come this way."""
        self.checkpoints.refuse_torn()
        if self._since.forwards == 0:
            self._parts.running.keep()
        with naming_the_lost(), self._origin.forward(), self._branches.forward():
            output = self._ds(*args, **batch)
        self._since.forwards += torch.is_grad_enabled()
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
        return self._backward(loss, 1.0 / (self._since.planned * self.world_size))

    @naming_the_lost()
    @torch.enable_grad()  # torch's own backward may be called under no_grad; this one multiplies the loss, and DeepSpeed too
    def _backward(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """Backward of `loss * weight`, summed over ranks; `weight` is the loss's share in the reported one."""
        agreement.same_freezing(self._parts.frozen_map, self.global_step, None if self._since.backwards else self._ds.module)
        if why := self._since.no_backward() or self._origin.questionable(loss, self._since.planned):
            self._origin.refuse(why)
        self._origin.tell_eval_mode()
        loss = loss.reshape(())
        scaled = loss.float() * (weight * self.world_size)  # DeepSpeed takes the mean over ranks; what is wanted is the sum
        if self._reduction.during_backward and not self._uniform:
            scaled.register_hook(self._agree_on_parameters)
        self._reduction.begin_backward(self._since.at_last, self._since.planned == 1)
        with self._since.adding(loss.detach().double() * weight), self._origin.backward(), HERE.together("engine.backward()"):
            self._ds.backward(scaled, scale_wrt_gas=False)
        return loss.detach()

    def _agree_on_parameters(self, _grad: torch.Tensor) -> None:
        """At the start of a backward: if ranks will use different parameters, reduce at its end, in one order (DeepSpeed#777)."""
        used = self._reduction.used()
        if not agreement.same_parameters(used, self._parts.names, self.global_step, self._since.backwards, self.stage):
            self._reduction.defer()

    # ------------------------------------------------------------ step

    @naming_the_lost()
    @HERE.together("engine.step()")
    def step(self) -> StepResult | None:
        """Update the weights once `accumulation` backwards are done; before that, None.

        Raises:
            BypassError: if no backward went through the engine since the last step.
            NonFiniteError: on all ranks, after `nonfinite_limit` skipped steps in a row.
            RanksDisagreeError: if ranks did different things, or hold different state.
            ModelError: if a parameter was frozen or unfrozen since construction.
        """
        if self._since.backwards == 0:
            self._origin.refuse("step() without engine.backward(loss) since the last step: nothing to apply.")
        if self._since.backwards < self._since.planned:
            return None
        if why := self._rates.changed() or self._parts.writes.lost():
            self._origin.refuse(why)
        told = self._since.exchange(
            self.global_step, self._parts.flags, self._reduction.order_hash, self._parts.writes.take_over()
        )
        verdict = guards.judge(told, self.global_step + 1, self._parts.names)
        lr = self._rates.set(self.global_step)
        self.checkpoints.before_update()
        with self._origin.misuse.ours():
            applied, norm = self._reduction.step(refuse=not verdict.apply)
        self._parts.writes.settled()
        self._parts.running.settle(applied)
        reason = verdict.reason
        if verdict.apply and not applied:
            reason = f"step {self.global_step + 1}: the norm of the reduced gradient is not finite although every rank's own is"
        return self._finish(verdict, lr, norm, applied, reason)

    def _finish(self, verdict: guards.Verdict, lr: float, norm: float, applied: bool, reason: str) -> StepResult:
        """Count, report, compare, and stop if it must."""
        self.global_step += 1
        self.updates += applied
        self.tokens += verdict.tokens
        self.nonfinite.note(applied)
        self._since.clear()
        self._parts.flags.clear()
        HERE.stepped(self.global_step)
        if not applied:
            self.nonfinite.report(reason, self.global_step, lr)
        self._rates.tell_spent(self.global_step, lr)
        if self.agree_every and self.global_step % self.agree_every == 0:
            self.check_agreement()
        return StepResult(self.global_step, verdict.loss, lr, norm, verdict.tokens, applied, self.nonfinite.total, reason)

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
            DataError: if a batch is no mapping or holds `num_items_in_batch`; on every rank, if the global batch holds no target at all.
        """
        if self._since.backwards:
            self._origin.refuse(self._since.unfinished())
        micro_batches = steps.listed(micro_batches)
        counts = [steps.counted(batch, self.count_targets) for batch in micro_batches]
        total = self._since.plan(counts, self.global_step)
        for batch, count in zip(micro_batches, counts):
            batch = batch if count else steps.without_targets(batch)
            held = None if self._reduction.stream is None else self._since.held
            loss = steps.loss_of(self(**steps.move(batch, self.device, self.dtype, held)))
            self._backward(loss, count / total)
        result = self.step()
        assert result is not None
        return result

    def evaluate(
        self, batches: Iterable[Batch], limit_s: float | None = 120.0, stop: Callable[[], bool] = lambda: False
    ) -> EvalResult:
        """Mean loss over all targets of all ranks' batches, without gradients; every module's mode is restored.

        Every rank calls it. A rank with fewer batches than another repeats its last one with weight zero, so that all run
        the same forwards.

        Args:
            batches: this rank's batches; at least one.
            limit_s: longest wait for the other ranks at the start.
            stop: asked before each batch.

        Raises:
            DataError: on every rank, if there is no batch or no target on any.
            StoppedError: on every rank, as soon as `stop` is true on one.
            RanksDisagreeError: if not every rank calls it, one has no batch at all, or another rank's `batches` failed.
        """
        return evaluation.evaluate(self, batches, limit_s, stop)

    # ------------------------------------------------------------ saving

    def save_checkpoint(
        self,
        directory: str | Path,
        tag: str | None = None,
        state: dict[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Collection[int] = (),
        wait: bool = True,
    ) -> Path:
        """Write `directory/<tag>` ("checkpoint-<global_step>"): all that training needs to go on, on any number of ranks.

        Every rank calls it, between steps. Arguments and errors: `checkpoint.native.Checkpoints.save`; files: checkpoint/FORMAT.md.
        """
        self._parts.writes.before_save(self._origin.refuse)
        return self.checkpoints.save(
            Path(directory).absolute(), tag, state or {}, keep_last=keep_last, keep_every=keep_every, keep=keep, wait=wait
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
        self._rates.forget()
        return self.checkpoints.load(Path(directory).absolute(), tag, trust)

    def save_deepspeed_checkpoint(
        self, directory: str | Path, tag: str | None = None, state: dict[str, Any] | None = None
    ) -> Path:
        """Write DeepSpeed's own layout, for tools that need it; blocks, and loads at the same number of ranks only."""
        self._parts.writes.before_save(self._origin.refuse)
        return deepspeed_format.save(self, directory, tag, state or {})

    def export(self, directory: str | Path, dtype: str = "bfloat16", tokenizer: Any = None) -> Path:
        """Write the model as a Hugging Face folder in `dtype`, from the masters where bf16 cannot hold it; errors: `weights.export_model`."""
        meet(Point.EXPORT, self.global_step, 0, limit_s=meeting.MEET_S)
        self.checkpoints.refuse_torn()
        self._since.tell_left_out()
        self._reduction.finish_update(states=True)
        weights.export_model(self.module, directory, dtype=dtype, tokenizer=tokenizer, master_of=self._parts.writes.masters())
        return Path(directory)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Does nothing, for loops written for DDP: accumulation is counted by the engine alone (ZeRO refuses no_sync)."""
        yield

    def train(self, mode: bool = True) -> None:
        """Set the module's mode, as on nn.Module."""
        self._ds.module.train(mode)

    def eval(self) -> None:
        """Set evaluation mode, as on nn.Module."""
        self._ds.module.eval()

    def close(self) -> None:
        """Finish a save in flight and let go of the module: another Engine may take it."""
        try:
            self.checkpoints.close()
        finally:
            self._parts.release()
            self._origin.release()
            self._branches.release()

    @property
    def deepspeed(self) -> Any:
        """DeepSpeed's own engine, for what this class does not offer; its forward, backward and step are not to be called."""
        self._reduction.finish_update(states=True)
        return self._ds

    @property
    def between_steps(self) -> bool:
        """True if no gradient is being accumulated."""
        return self._since.backwards == 0 and not self._since.torn

    @property
    def module(self) -> torch.nn.Module:
        """The model itself: for inspection, generation, and writing weights between steps (see `writes`); not for training passes."""
        self._reduction.finish_update()
        return self._ds.module

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return torch.device(self._ds.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that forward uses."""
        return torch.bfloat16 if self.settings.bf16 else torch.float32

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
        return self.settings.stage

    @property
    def micro_batch(self) -> int:
        """Samples a forward and rank."""
        return self.settings.micro_batch

    @property
    def accumulation(self) -> int:
        """Forwards a step."""
        return self.settings.accumulation

    @property
    def lr(self) -> float:
        """The learning rate of the next update, of the first parameter group."""
        return self._rates.at(self.global_step)

    def summary(self) -> dict[str, Any]:
        """What runs here, for the log and the report: stage, batch, optimizer, schedule, dtypes."""
        return summary(self.settings, self.world_size, self.module, self._reduction)
