"""From a ds_config and the Engine's arguments to what DeepSpeed is started with: pure, and every decision is said.

The Engine owns the optimizer, the schedule, clipping at stage 0 and the accumulation count; DeepSpeed gets a private config.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigtrain import optim
from bigtrain.config import ModelShape, Resolved, RunValues, left_open, load, refuse_undone, resolve
from bigtrain.config.batch import ACCUMULATION, GLOBAL, MICRO, BatchError, Given, solve_batch
from bigtrain.config.rules import Context
from bigtrain.config.rules_run import PATHS, SCHEDULE_NAMES, conflicts
from bigtrain.config.rules_training import dtype_name
from bigtrain.config.run import DEFAULTS, FLAGS
from bigtrain.errors import ConfigError, UsageError
from bigtrain.optim.options import Offload, Options
from bigtrain.plan.constants import STATE_BUFFERS

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "adamw8bit": "adamw_8bit", "muon": "muon"}

# Sections that `settle` decides, from what the file itself says. Of data_types, because `train_step` may be given more micro
# batches than the accumulation of the file: sums stay fp32 where resolving for one micro step would save them.
SETTLED_HERE = ("optimizer", "scheduler", "data_types")


@dataclass
class Settings:
    """What was decided.

    Attributes:
        config: for `deepspeed.initialize`.
        stage, bf16: what the config asks for.
        micro_batch, accumulation, max_grad_norm: as used; micro_batch and accumulation from the config unless given.
        optimizer, options: its name, and what it is built with.
        scheduler, warmup_steps, total_steps, scheduler_kwargs: as used.
        notes: decisions between two sources, one sentence each.
    """

    config: dict[str, Any]
    stage: int
    bf16: bool
    micro_batch: int
    accumulation: int
    max_grad_norm: float
    optimizer: str
    options: Options
    scheduler: str
    warmup_steps: int
    total_steps: int | None
    scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def schedule(self, own: Callable[[int], float] | None = None) -> Callable[[int], float]:
        """The factor on the learning rate as a function of the step; `own`, of `schedule_of`, where there is one.

        Raises:
            UsageError: the values contradict each other, or `scheduler_kwargs` has a name that `optim.schedule` does not know.
        """
        if own:
            own(0)
            self.scheduler = "a function"
            return own
        optim.refuse_unknown(self.scheduler_kwargs)
        return optim.schedule(
            self.scheduler, warmup_steps=self.warmup_steps, total_steps=self.total_steps, **self.scheduler_kwargs
        )


def pair_of(betas: Any) -> tuple[Any, Any]:
    """Adam's two, or None for both.

    Raises:
        UsageError: there are not two.
    """
    if betas is None:
        return None, None
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise UsageError(f"betas is {betas!r}: two numbers below 1, such as (0.9, 0.999).")
    return betas[0], betas[1]


def schedule_of(given: Any, warmup_steps: Any, kwargs: Any) -> tuple[Any, Callable[[int], float] | None]:
    """The name to settle the config with, and the factor of a function given in its place; UsageError if a warm-up stands beside that."""
    if not callable(given) or isinstance(given, type):
        return given, None
    if warmup_steps or kwargs:
        raise UsageError(
            "lr_scheduler is a function: it gives the factor of every update, the warm-up's too. Leave out warmup_steps and "
            "lr_scheduler_kwargs, or name a schedule (linear, cosine, constant, wsd)."
        )
    return "constant", optim.own_schedule(given)


def refuse_other_kinds(run: RunValues, seed: Any) -> None:
    """Check that numbers are numbers: a value out of a file or the environment is text until somebody reads it.

    Raises:
        UsageError: naming each that is not.
    """
    for name, value, instead in (
        ("optimizer", run.optim, f"the engine builds it itself, on ZeRO's partitions: a name ({', '.join(optim.OPTIMIZERS)})"),
        (
            "lr_scheduler",
            run.lr_scheduler_type,
            "a name (linear, cosine, constant, wsd), or a function from the update's number to a factor",
        ),
    ):
        if value is not None and not isinstance(value, str):
            what = value.__name__ if isinstance(value, type) else type(value).__name__
            raise UsageError(f"Engine({name}=...) is a {what}: {instead}.")
    texts = ("optim", "lr_scheduler_type")
    wrong = [f"{n} is {v!r}" for n, v in run.given().items() if n not in texts and isinstance(v, str | bytes | Sequence)]
    wrong += [] if isinstance(seed, numbers.Integral) else [f"seed is {seed!r}"]
    if wrong:
        raise UsageError(f"Engine: {', '.join(wrong)}: give a number (float(...) or int(...) of a text).")


def read(
    ds_config: str | Path | Mapping[str, Any] | Resolved,
    run: RunValues,
    *,
    world_size: int,
    device: str,
    model_config: Any = None,
) -> tuple[dict[str, Any], list[str]]:
    """A private copy of the config, linted, with no "auto" left in it; sections `SETTLED_HERE` hold what the file says.

    Args:
        ds_config: path, preset name or mapping; what `bigtrain.config.resolve` returned is taken as it is.
        run: what the caller said. It fills what the file leaves open; what the file contradicts is left to `settle`.
        world_size: number of ranks.
        device: "cuda" or "cpu".
        model_config: the model's Hugging Face config, if it has one: it fills bucket sizes.

    Returns:
        The config, and the lint's warnings.

    Raises:
        ConfigError: every problem of the file in one report.
    """
    if isinstance(ds_config, Resolved):
        return ds_config.engine_config(), []
    if not isinstance(ds_config, str | Path | Mapping):
        raise ConfigError(f"ds_config is a {type(ds_config).__name__}: give a path, the name of a preset, or a mapping.")
    config = load(ds_config)
    name = "ds_config" if isinstance(ds_config, Mapping) else str(ds_config)
    has_shape = isinstance(model_config, Mapping) or hasattr(model_config, "to_dict")
    resolved = resolve(
        config,
        run=left_open(config, run),
        model=ModelShape.from_config(model_config) if has_shape else None,
        world_size=world_size,
        device=device,
        name=name,
    )
    refuse_undone(config, name, optimizer=run.optim is None, scheduler=run.lr_scheduler_type is None)
    warnings = [str(problem) for problem in resolved.problems if problem.severity == "warning"]
    settled = {name: value for name, value in resolved.engine_config().items() if name not in SETTLED_HERE}
    for section in SETTLED_HERE:
        if config.get(section):
            settled[section] = {name: value for name, value in config[section].items() if value != "auto"}
    if summed_in := dtype_name((settled.get("data_types") or {}).get("grad_accum_dtype")):  # one of its four spellings
        settled["data_types"]["grad_accum_dtype"] = summed_in
    return settled, warnings


def settle(
    config: dict[str, Any],
    run: RunValues,
    *,
    world_size: int,
    device: str = "cpu",
    scheduler_kwargs: Mapping[str, Any] | None = None,
    offload_gradients: float = 0.0,
) -> Settings:
    """Decide every value once. What `run` says wins over the config, and it is said in `notes`.

    Args:
        config: from `read`; its sections `optimizer` and `scheduler` are taken out of it.
        run: what the caller said; None for what is left to the config.
        world_size: number of ranks.
        device: "cuda" or "cpu".
        scheduler_kwargs: see `Settings.schedule`.
        offload_gradients: share of the gradients that leave the GPU during backward.

    Raises:
        ConfigError: on batch sizes that contradict each other.
        UsageError: on an optimizer or schedule that cannot be used here.
    """
    notes: list[str] = []
    stage, bf16, offload = _regime(config)
    zero = config.get("zero_optimization") or {}
    said = _said(config, run, notes)
    optimizer_section = config.pop("optimizer", None) or {}
    scheduler_section = config.pop("scheduler", None) or {}
    if run.optim is not None and optimizer_section:
        notes.append(
            f"two optimizers were given: {run.optim!r} to the Engine and {optimizer_section.get('type')!r} in the ds_config. "
            "The Engine's is used; the values of the ds_config's section serve where the Engine was given none."
        )
    name = optim.canonical_name(run.optim or _optimizer_name(optimizer_section))
    scheduler = _scheduler(scheduler_section, run.lr_scheduler_type, notes)
    micro, accum = _batch(config, world_size, run.micro_batch, run.accumulation)
    norm = float(said.max_grad_norm)
    if not norm >= 0.0:
        raise UsageError(f"max_grad_norm is {norm}: the largest norm of the gradient, or 0 for no clipping.")
    private = _private(config, stage, bf16, micro, accum, world_size, norm, notes)
    _own_offload_only(name, zero)
    if offload_gradients != 0.0:
        _gradients_can_leave(offload_gradients, name, private, world_size, offload)
    _add_what_the_optimizer_needs(private, name, stage, bf16, offload)
    if said.total_steps is None and scheduler != "constant":
        scheduler = _constant(scheduler, run.lr_scheduler_type, notes)
    lr, decay = float(said.learning_rate), float(said.weight_decay)
    notes += hardly_meant(lr, decay)
    return Settings(
        config=private,
        stage=stage,
        bf16=bf16,
        micro_batch=micro,
        accumulation=accum,
        max_grad_norm=norm,
        optimizer=name,
        options=Options(
            lr=lr,
            betas=(said.adam_beta1, said.adam_beta2),
            eps=float(said.adam_epsilon),
            weight_decay=decay,
            offload=_on_host(zero["offload_optimizer"], offload_gradients) if offload else None,
            device=device,
        ),
        scheduler=scheduler,
        warmup_steps=_whole("warmup_steps", said.warmup_steps),
        total_steps=None if said.total_steps is None else _whole("total_steps", said.total_steps),
        scheduler_kwargs=dict(scheduler_kwargs or {}),
        notes=notes,
    )


_NUMBERS = (
    "learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "warmup_steps", "total_steps", "max_grad_norm",
)  # fmt: skip

# What the Engine calls the program's flag; the others have one name.
_ARGUMENTS = {FLAGS[name]: name for name in _NUMBERS} | {
    FLAGS["adam_beta1"]: "betas", FLAGS["adam_beta2"]: "betas", FLAGS["adam_epsilon"]: "eps",
}  # fmt: skip


def _said(config: Mapping[str, Any], run: RunValues, notes: list[str]) -> Any:
    """The numbers of optimizer, schedule and clipping: what `run` says, else the config, else the defaults; contradictions are noted."""
    ctx = Context(config)
    places = [(name, path) for name, paths in PATHS.items() if name in _NUMBERS for path in reversed(paths)]  # the first counts
    held = {name: value for name, path in places if (value := ctx.get(path)) not in (None, "auto")}
    betas = ctx.get("optimizer.params.betas")
    held |= zip(("adam_beta1", "adam_beta2"), betas if isinstance(betas, list | tuple) else ())
    for c in conflicts(Context(config, run=RunValues(**{n: v for n, v in run.given().items() if n in _NUMBERS}))):
        given = f"{_ARGUMENTS[c.flag]}: the Engine was given {c.flag_value}"
        notes.append(f"{given}, {c.path} of the ds_config says {c.file_value}; {c.flag_value} is used.")
    return replace(DEFAULTS, **{**held, **run.given()})


_LR_MOST = 0.1
_LR_LEAST = 1e-9


def hardly_meant(learning_rate: float, weight_decay: float) -> list[str]:
    """What a run may be started with and hardly anybody means, a sentence each. Adam and Muon move a weight by about the rate, whatever
    the size of its gradient, and decay takes rate * weight_decay of it away (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2)."""
    notes = []
    if learning_rate > _LR_MOST:  # weights are drawn with deviations of 0.02 or so
        notes.append(
            f"the learning rate is {learning_rate:g}: each update moves every weight by about as much, and most weights of a model are smaller "
            f"than {_LR_MOST:g}. Rates of 1e-6 to 1e-2 are usual."
        )
    if 0 < learning_rate < _LR_LEAST:  # half a unit in the last place of an fp32 weight of 0.02 is 9e-10
        notes.append(
            f"the learning rate is {learning_rate:g}: updates below {_LR_LEAST:g} are lost in the rounding of fp32 weights, so that little or "
            "nothing will move. Rates of 1e-6 to 1e-2 are usual."
        )
    if learning_rate <= _LR_MOST and learning_rate * weight_decay > _LR_MOST:
        notes.append(
            f"weight_decay is {weight_decay:g}: at the learning rate {learning_rate:g} each update takes {learning_rate * weight_decay:.0%} of every "
            "weight away. Values of 0 to 0.1 are usual."
        )
    return notes


def _whole(name: str, value: float) -> int:
    if int(value) != value:
        raise UsageError(f"{name} is {value}: a number of updates, not a share of them.")
    return int(value)


def _on_host(block: Mapping[str, Any], gradients: float) -> Offload:
    """What an `offload_optimizer` block says to optimizers that keep their own state on the host."""
    return Offload(
        ratio=float(block.get("ratio", 1.0)),
        pin=block.get("pin_memory", True) is not False,
        buffers=max(1, int(block.get("buffer_count") or STATE_BUFFERS)),
        gradients=float(gradients),
    )


def _add_what_the_optimizer_needs(private: dict[str, Any], name: str, stage: int, bf16: bool, offload: bool) -> None:
    """Merge the keys that DeepSpeed must find for this optimizer into `private`."""
    summed_in = (private.get("data_types") or {}).get("grad_accum_dtype")
    patch = optim.engine_config_patch(name, stage=stage, offload=offload, grad_accum_dtype=summed_in, bf16=bf16)
    for key, value in patch.items():
        private[key] = {**(private.get(key) or {}), **value} if isinstance(value, dict) else value


def _own_offload_only(name: str, zero: dict[str, Any]) -> None:
    """Refuse what DeepSpeed's own offload can do and an optimizer that keeps its state on the host itself cannot."""
    block = zero.get("offload_optimizer") or {}
    if not optim.OPTIMIZERS[name].own_offload:
        return
    if block.get("device") == "nvme":
        raise UsageError(
            f'optimizer {name!r} keeps its state in host memory: write offload_optimizer.device "cpu", not "nvme".'
        )
    if zero.get("zenflow") or block.get("super_offload"):
        raise UsageError(
            f"optimizer {name!r} brings its own overlap: remove zenflow and super_offload, or use optimizer adamw."
        )


def _gradients_can_leave(share: float, name: str, private: dict[str, Any], world_size: int, offload: bool) -> None:
    """Refuse a share of gradients to be offloaded where they would not stay as autograd leaves them (bigtrain/engine/reduction.py)."""
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share <= 1.0:
        raise UsageError(f"offload_gradients is {share!r}: it is a share of the gradients, from 0 to 1.")
    summed_in = (private.get("data_types") or {}).get("grad_accum_dtype")
    wanted = {
        "one rank": world_size == 1,
        "zero_optimization.stage 2": private["zero_optimization"]["stage"] == 2,
        'offload_optimizer.device "cpu"': offload,
        "an adamw_split optimizer": optim.OPTIMIZERS[name].own_offload,
        'data_types.grad_accum_dtype "bf16"': summed_in not in ("fp32", "float32"),
    }
    missing = [what for what, there in wanted.items() if not there]
    if missing:
        raise UsageError(f"offload_gradients {share} needs {', '.join(wanted)}; missing here: {', '.join(missing)}.")


def _regime(config: dict[str, Any]) -> tuple[int, bool, bool]:
    """(stage, bf16, optimizer on the host)."""
    zero = config.get("zero_optimization") or {}
    if (config.get("fp16") or {}).get("enabled") is True:
        raise ConfigError(
            "fp16.enabled is true: bigtrain trains in bf16 (or fp32), without loss scaling. Write bf16.enabled: true."
        )
    groups = {"tensor_parallel.autotp_size": (config.get("tensor_parallel") or {}).get("autotp_size")}
    groups["sequence_parallel_size"] = config.get("sequence_parallel_size")
    groups["pipeline.stages"] = (config.get("pipeline") or {}).get("stages")
    for path, size in groups.items():
        if isinstance(size, int) and size > 1:
            raise ConfigError(
                f"{path} is {size}: bigtrain gives every rank rows of its own and shards by ZeRO alone. Remove it."
            )
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") not in ("none", None)
    return int(zero.get("stage", 0)), (config.get("bf16") or {}).get("enabled") is True, offload


def _optimizer_name(section: dict[str, Any]) -> str:
    if not section:
        return str(DEFAULTS.optim)
    kind = str(section.get("type", "")).lower().replace("_", "")
    if kind not in _OPTIMIZERS:
        raise UsageError(
            f"optimizer.type {section.get('type')!r} of the ds_config is none of bigtrain's ({', '.join(optim.OPTIMIZERS)}). "
            "Remove the section and pass optimizer=... to the Engine."
        )
    return _OPTIMIZERS[kind]


def _scheduler(section: dict[str, Any], argument: str | None, notes: list[str]) -> str:
    if not section:
        return argument or str(DEFAULTS.lr_scheduler_type)
    kind = section.get("type")
    if argument is not None:
        notes.append(
            f"two schedules were given: {argument!r} to the Engine and {kind!r} in the ds_config. The Engine's is used; the "
            "section's warm-up and total steps serve where the Engine was given none."
        )
        return argument
    if kind not in SCHEDULE_NAMES:
        raise UsageError(
            f"scheduler.type {kind!r} of the ds_config is not known here: the Engine owns the schedule. It translates "
            f"{', '.join(SCHEDULE_NAMES)}; else remove the section and pass lr_scheduler=... to the Engine."
        )
    notes.append(
        f"scheduler {kind!r} of the ds_config is run as bigtrain's {SCHEDULE_NAMES[kind]!r} with the same warm-up and steps."
    )
    return SCHEDULE_NAMES[kind]


def _constant(scheduler: str, asked: str | None, notes: list[str]) -> str:
    if asked is not None:
        raise UsageError(f"schedule {scheduler!r} needs total_steps: how many updates the run makes.")
    notes.append("total_steps was not given, so the learning rate stays constant after the warm-up.")
    return "constant"


def _batch(config: dict[str, Any], world: int, micro: int | None, accum: int | None) -> tuple[int, int]:
    """Micro batch and accumulation, from arguments, config, and the global batch."""
    known: dict[str, Given | None] = {}
    for key, name, argument in ((MICRO, "micro_batch", micro), (ACCUMULATION, "accumulation", accum), (GLOBAL, "", None)):
        value = None if config.get(key) == "auto" else config.get(key)
        if argument is not None and value is not None and argument != value:
            raise ConfigError(
                f"{name}: the Engine was given {argument}, the ds_config says {value}. Say it in one place, or the same."
            )
        found = value if argument is None else argument
        if found is not None and int(found) != found:
            raise ConfigError(f"{name or key} is {found}: a whole number is needed.")
        known[key] = None if found is None else Given(int(found), "ds_config" if argument is None else "Engine")
    try:
        batch = solve_batch(known[MICRO], known[ACCUMULATION], known[GLOBAL], world)
    except BatchError as error:
        raise ConfigError(str(error)) from error
    return batch.micro, batch.accumulation


def _private(
    config: dict[str, Any], stage: int, bf16: bool, micro: int, accum: int, world: int, norm: float, notes: list[str]
) -> dict[str, Any]:
    config = {**config, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accum}
    config["train_batch_size"] = micro * accum * world
    config["gradient_clipping"] = norm
    zero = config["zero_optimization"] = {**(config.get("zero_optimization") or {}), "stage": stage}
    config.setdefault("steps_per_print", 1_000_000_000)  # the Engine's own log has these numbers, and more
    if stage == 0:
        # bigtrain.engine.master holds the fp32 masters and accumulators and clips: DeepSpeed is not to do either a second time.
        config["bf16"] = {"enabled": False}
        config["gradient_clipping"] = 0.0
        config.pop("data_types", None)
    elif bf16 and not (config.get("bf16") or {}).get("bf16_master_weights_and_grads"):
        types = config["data_types"] = dict(config.get("data_types") or {})
        types.setdefault("grad_accum_dtype", "fp32")
    if stage == 1 and zero.get("overlap_comm"):
        zero["overlap_comm"] = False
        notes.append("overlap_comm is off at stage 1: gradients are reduced once a step, in one order on every rank.")
    return config
