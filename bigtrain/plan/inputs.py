"""What a plan is made from: model, ZeRO settings and run values, checked together, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from bigtrain.errors import UsageError
from bigtrain.partition import last_share
from bigtrain.plan.activations import block_bytes
from bigtrain.plan.cards import H100_FLOPS
from bigtrain.plan.families import ModelParameters, model_parameters, parameters_from_shapes
from bigtrain.plan.family_kept import Attention
from bigtrain.plan.family_others import ROBERTA, T5, VISION_LANGUAGE
from bigtrain.plan.geometry import Geometry, geometry, geometry_of_shapes
from bigtrain.plan.states import LAYOUTS, StateLayout, layout_name
from bigtrain.plan.zero_settings import ZeroSettings, section, settings_from_config

Kernels = Literal["hf", "liger"]
Loss = Literal["full", "chunked", "fused"]
Checkpointing = Literal["none", "full", "attention", "selective", "offload", "offload_inputs"]

_NO_TILES = {"opt", "bert", *ROBERTA}  # their blocks compute the feed-forward part themselves (models/feedforward.py)
# Families whose forward does more with its logits than to scale or cap them for the causal loss (kernels/attach.py `why_not_chunked`).
_OWN_LOSS = {"bert", *ROBERTA, *T5}
_SCALES = {"granite", "granitemoe", "cohere", "cohere2"}  # where logits are made anew, times a factor
# Beyond any run; without a bound a slip of the keyboard would keep the search busy for hours.
_MOST = {"world_size": 2**17, "micro_batch": 2**31, "seq_len": 2**31, "accumulation": 2**31}
_ZERO_NAMES = frozenset(f.name for f in fields(ZeroSettings))


@dataclass(frozen=True, kw_only=True)
class PlanInput:
    """Everything that decides what a rank holds.

    Attributes:
        parameters, geometry: of the model.
        settings: ZeRO.
        world_size: ranks; gpus_per_node: ranks of one host (default: all).
        micro_batch: sequences a rank takes at once; seq_len: tokens of each; accumulation: micro steps a step.
        optimizer: a name of `plan.states.LAYOUTS` or an alias.
        checkpointing: "none", or what is kept of a block that is recomputed in backward: "full" (its input), "attention" (that and
            results of attention), "selective" (those of matrix products too), "offload" (input and results of attention, on the
            host), "offload_inputs" (its input, on the host).
        checkpoint_blocks: how many blocks are recomputed, the first ones; None: all. 0 is another way to say "none".
        mlp_tile_tokens: the feed-forward parts run over tiles of so many tokens (models/tiles.py); 0: as a whole.
        kernels: "hf" (transformers' own modules with sdpa) or "liger".
        loss: "full" (all logits in fp32), "chunked" (a chunk of tokens at a time, in fp32), "fused" (the same
            by Triton's kernels, in place); None: by kernels and chunks_loss.
        chunks_loss: bigtrain's own loss is there without liger's kernels: liger-kernel is not installed, or does not know the model.
        decay_groups: two parameter groups (matrices decay, vectors do not), as the optimizer builder makes them.
        frozen: names of modules or parameters that do not train: no gradient, no states.
        drawn: values are drawn in fp32 from a seed (a preset) instead of read from files.
        device: "cuda", or "cpu" for a run whose device memory is host memory.
        card_flops: dense bf16 peak of the slowest card, FLOP/s; of an H100 where its name is not known.
        expandable: the caching allocator's `expandable_segments`, which bigtrain turns on unless the user has set something.
    """

    parameters: ModelParameters
    geometry: Geometry
    settings: ZeroSettings = field(default_factory=ZeroSettings)
    world_size: int = 1
    gpus_per_node: int | None = None
    micro_batch: int = 1
    seq_len: int = 4096
    accumulation: int = 1
    optimizer: str = "adamw"
    checkpointing: Checkpointing = "full"
    checkpoint_blocks: int | None = None
    mlp_tile_tokens: int = 0
    kernels: Kernels = "hf"
    loss: Loss | None = None
    chunks_loss: bool = False
    decay_groups: bool = True
    frozen: tuple[str, ...] = ()
    drawn: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    card_flops: float = H100_FLOPS
    expandable: bool = True

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise UsageError(f"{name} is {value!r}: a whole number from 1 to {most:,} is needed")
        if self.gpus_per_node is not None and not 1 <= self.gpus_per_node <= self.world_size:
            raise UsageError(
                f"gpus_per_node is {self.gpus_per_node}: a host has at least 1, and at most all {self.world_size} of the ranks; correct one of the two"
            )
        object.__setattr__(self, "optimizer", layout_name(self.optimizer))
        if self.settings.bf16_states and self.optimizer == "adamw":
            object.__setattr__(self, "optimizer", "adamw_bf16")
        self._check_optimizer()
        self._check_tiles()
        self._settle_blocks()
        for name in self.frozen:
            if not any(_under(p.name, name) for p in self.parameters.items):
                raise UsageError(f"frozen names '{name}', but no module or parameter of the model is called so")
        if not any(self.trains):
            raise UsageError(f"frozen = {self.frozen} leaves no parameter to train")

    def _check_optimizer(self) -> None:
        layout, stage = LAYOUTS[self.optimizer], self.settings.stage
        if stage not in layout.stages:
            able = ", ".join(map(str, layout.stages))
            raise UsageError(f"optimizer {self.optimizer} works at ZeRO stages {able}, not at stage {stage}")
        if self.settings.offload_gradients and self.device == "cuda" and not self.alone:
            raise UsageError(
                f"offload_gradients {self.settings.offload_gradients:g} needs one rank, stage 2, offload_optimizer with an adamw_split "
                "optimizer, and gradients summed in bf16 (data_types.grad_accum_dtype)"
            )
        if layout.own_offload and self.settings.offload_param and self.device == "cuda":
            raise UsageError(
                f"optimizer {self.optimizer} needs its weights on the GPU: remove offload_param, or use adamw or adamw_8bit"
            )

    def _check_tiles(self) -> None:
        tokens, kind = self.mlp_tile_tokens, self.parameters.kind
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise UsageError(f"mlp_tile_tokens is {tokens!r}: a whole number of tokens, or 0 for no tiles, is needed")
        if tokens and (self.geometry.experts or kind in _NO_TILES):
            why = "routes tokens to experts" if self.geometry.experts else "has no feed-forward module of its own"
            raise UsageError(f"mlp_tile_tokens {tokens}: a block of '{kind}' {why}, so it cannot be computed in tiles")

    def _settle_blocks(self) -> None:
        """One spelling for each meaning: no number with "none" and for all blocks, "none" for no block."""
        asked, there = self.checkpoint_blocks, self.block_count
        if asked is None:
            return
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
            raise UsageError(f"checkpoint_blocks is {asked!r}: a whole number of blocks is needed")
        if asked > there and self.blocks_are_all:
            raise UsageError(f"checkpoint_blocks is {asked}, but the model has {there} blocks: give at most {there}")
        if asked == 0:
            object.__setattr__(self, "checkpointing", "none")
        if self.checkpointing == "none" or asked >= there:
            object.__setattr__(self, "checkpoint_blocks", None)

    @property
    def block_count(self) -> int:
        """Repeated blocks of the model."""
        return len(self.parameters.blocks)

    @property
    def blocks_are_all(self) -> bool:
        """False where the program finds more blocks than the plan counts: those of a vision tower."""
        return self.parameters.kind not in VISION_LANGUAGE

    @property
    def recomputed_blocks(self) -> int:
        """How many blocks are recomputed in backward; the first ones, see `models.enable_activation_checkpointing`."""
        if self.checkpointing == "none":
            return 0
        return self.block_count if self.checkpoint_blocks is None else self.checkpoint_blocks

    @property
    def offloads_inputs(self) -> bool:
        """What recomputed blocks keep waits on the host; a CPU has nowhere else to put it."""
        return self.checkpointing in ("offload", "offload_inputs") and self.device == "cuda"

    @cached_property
    def of_attention(self) -> tuple[tuple[int, ...], ...]:
        """Bytes of attention's results, tensor by tensor, that each recomputed block keeps; () where the policy or the kernel does not."""
        if self.checkpointing not in ("attention", "offload"):
            return ()
        blocks = list(self.parameters.blocks)[: self.recomputed_blocks]

        def kept(block: int) -> tuple[int, ...]:
            return block_bytes(self.geometry, self.tokens, self.kernels, block, self.seq_len, self.device).of_attention

        each = tuple(map(kept, blocks)) if len(self.geometry.unlike) > 1 else (kept(0),) * len(blocks)
        return each if any(each) else ()

    @cached_property
    def streams(self) -> bool:
        """The optimizer keeps its state on the host by itself and streams it through the GPU."""
        return self.settings.offload_optimizer and LAYOUTS[self.optimizer].own_offload and self.device == "cuda"

    @cached_property
    def alone(self) -> bool:
        """One rank that streams its state and leaves gradients where autograd puts them: they may leave during backward."""
        return self.streams and self.world_size == 1 and self.settings.stage == 2 and self.settings.grad_bytes == 2

    @cached_property
    def no_buckets(self) -> bool:
        """One rank at stage 2 leaves bf16 gradients where autograd puts them, or adds them to fp32 sums as they come.

        bigtrain/engine/reduction.py `_nobody_to_reduce_with`.
        """
        return self.world_size == 1 and self.settings.stage == 2 and not self.deepspeed_settings.offload_optimizer

    @cached_property
    def drawn_on_host(self) -> bool:
        """One rank below stage 3: fp32 values wait in host memory until all are drawn (models/build.py `_target`)."""
        one = self.world_size == 1 and self.settings.stage in (1, 2) and self.device == "cuda"
        return one and self.drawn and self.settings.offload_optimizer

    @cached_property
    def leaving(self) -> frozenset[int]:
        """The parameters whose gradients leave the GPU during backward."""
        if not self.alone or not self.settings.offload_gradients:
            return frozenset()
        trained = [i for i, trains in enumerate(self.trains) if trains]
        sizes = [self.parameters.items[i].elems for i in trained]
        return frozenset(trained[i] for i in last_share(sizes, self.settings.offload_gradients))

    @cached_property
    def leaving_bytes(self) -> int:
        """Of gradients in host memory."""
        return sum(2 * self.parameters.items[i].elems for i in self.leaving)

    @cached_property
    def deepspeed_settings(self) -> ZeroSettings:
        """What DeepSpeed is told: without optimizer offload, where the optimizer does that itself."""
        own = self.settings.offload_optimizer and LAYOUTS[self.optimizer].own_offload
        return replace(self.settings, offload_optimizer=False) if own else self.settings

    @cached_property
    def device_layout(self) -> StateLayout:
        """What stays beside the weights: all of the optimizer's state, or the part that is not streamed."""
        layout = LAYOUTS[self.optimizer]
        if not self.streams:
            return layout
        kept = 1.0 - self.settings.ratio
        return replace(layout, remainder=kept * layout.remainder, moments=kept * layout.moments,
                       matrix_moments=kept * layout.matrix_moments)  # fmt: skip

    @cached_property
    def _trained(self) -> _Trained:
        return self.parameters.fact(("trained", self.frozen), lambda: _trained(self.parameters, self.frozen))

    @property
    def trains(self) -> tuple[bool, ...]:
        """For every parameter, whether it trains."""
        return self._trained.each

    @property
    def trained_elems(self) -> int:
        """Elements that have gradients and optimizer states."""
        return self._trained.elems

    @property
    def largest_trained_elems(self) -> int:
        return self._trained.largest_elems

    @cached_property
    def moment_bytes(self) -> float:
        """Bytes of moments of an average trained element: Muon keeps one momentum for the matrices of blocks."""
        layout, matrices = self.device_layout, self._trained.matrix_elems
        rest = self.trained_elems - matrices
        return (layout.matrix_moments * matrices + layout.moments * rest) / self.trained_elems

    @property
    def tokens(self) -> int:
        """Tokens of one micro step of one rank."""
        return self.micro_batch * self.seq_len

    @property
    def tile_tokens(self) -> int:
        """Tokens of one tile of the feed-forward parts; 0: they run in one piece."""
        return self.mlp_tile_tokens if self.mlp_tile_tokens < self.tokens else 0

    @property
    def ranks_per_node(self) -> int:
        return min(self.world_size, self.gpus_per_node or self.world_size)

    @property
    def loss_kind(self) -> Loss:
        """How the loss is computed: as told, or as kernels/attach.py `use_liger` has it."""
        liger = self.kernels == "liger"
        if self.loss is not None or not (liger or self.chunks_loss):
            return self.loss or "full"
        # Another loss stays the model's own without liger, and at stage 3, where liger's cannot read the head.
        if self.parameters.kind in _OWN_LOSS and (not liger or self.settings.stage == 3):
            return "full"
        return "fused" if liger or self.device == "cuda" else "chunked"

    @property
    def scales_logits(self) -> bool:
        """Whether the model makes its logits anew, times a factor, before the loss."""
        return self.parameters.kind in _SCALES

    def but(self, **changes: Any) -> PlanInput:
        """A copy with other values; names of `ZeroSettings` are put there."""
        zero = {k: v for k, v in changes.items() if k in _ZERO_NAMES}
        outer = {k: v for k, v in changes.items() if k not in _ZERO_NAMES}
        settings = replace(outer.pop("settings", self.settings), **zero)
        return replace(self, settings=settings, **outer)


class _Trained(NamedTuple):
    each: tuple[bool, ...]
    elems: int
    largest_elems: int
    matrix_elems: int


def _trained(parameters: ModelParameters, frozen: tuple[str, ...]) -> _Trained:
    each = tuple(not any(_under(p.name, name) for name in frozen) for p in parameters.items)
    sizes = [(p.elems, p.block is not None and len(p.shape) > 1) for p, trains in zip(parameters.items, each) if trains]
    elems = [size for size, _ in sizes]
    return _Trained(each, sum(elems), max(elems, default=0), sum(size for size, matrix in sizes if matrix))


def _under(parameter: str, name: str) -> bool:
    return parameter == name or parameter.startswith(name + ".")


def plan_input(
    config: Mapping[str, Any] | None = None,
    *,
    shapes: Any = None,
    ds_config: Mapping[str, Any] | None = None,
    attention: Attention = "sdpa",
    grouped_experts: bool = True,
    **values: Any,
) -> PlanInput:
    """Make an input from a Hugging Face config (or a list of shapes) and a ds_config.

    Args:
        config: parsed config.json; or None with `shapes` = [[name, [sizes...]], ...].
        ds_config: parsed DeepSpeed JSON; None: ZeRO defaults.
        attention: how the model's classes attend.
        grouped_experts: routed experts are bigtrain's where kernels are fused on a GPU (not what peers run, nor what torch compiles).
        values: fields of `PlanInput` (`settings` overrides `ds_config`).

    Raises:
        UsageError: model type unknown, or a value is out of range.
    """
    if (config is None) == (shapes is None):
        raise UsageError("a plan needs a model config or a list of shapes, and only one of them")
    if config is not None:
        parameters, sizes = model_parameters(config), geometry(config, attention)
    else:
        parameters = parameters_from_shapes(shapes)
        sizes = geometry_of_shapes(parameters)
    if ds_config is not None:
        values.setdefault("settings", settings_from_config(ds_config, sizes.hidden))
        values = {**_run_values(ds_config), **values}
    fused = values.get("device", "cuda") == "cuda" and (values.get("kernels") == "liger" or values.get("chunks_loss"))
    if fused and grouped_experts and sizes.keeps.groups_experts:  # kernels/attach.py `use_liger` puts them in
        sizes = replace(sizes, keeps=replace(sizes.keeps, fused_experts=True))
    return PlanInput(parameters=parameters, geometry=sizes, **values)


def _run_values(config: Mapping[str, Any]) -> dict[str, Any]:
    names = {"train_micro_batch_size_per_gpu": "micro_batch", "gradient_accumulation_steps": "accumulation"}
    found: dict[str, Any] = {name: config[key] for key, name in names.items() if isinstance(config.get(key), int)}
    kind = section(config, "optimizer").get("type")
    return {**found, "optimizer": kind} if isinstance(kind, str) else found


def block_count(config: Mapping[str, Any]) -> int | None:
    """Blocks of the model of a Hugging Face config that can be recomputed; None where the config alone does not tell."""
    kind = config.get("model_type")
    if kind in VISION_LANGUAGE:
        return None
    try:
        found = len({p.block for p in model_parameters(config).items if p.block is not None})
    except UsageError:
        layers = config.get("num_hidden_layers")
        several = config.get("is_encoder_decoder") or any(key.endswith("_config") and config[key] for key in config)
        found = layers if isinstance(layers, int) and not several else 0
    return found or None
