"""What a loop written for plain torch does to a model, and what would do nothing, or harm, under an engine: refused where it is called.

Gradients are reduced and put away while a backward runs. So between a backward and its step there is nothing in `p.grad` that a clip or a
`zero_grad` could reach, and DeepSpeed's optimizer must not be stepped or emptied by anybody but the engine. Weights lie where DeepSpeed
laid them: a conversion would leave the update behind with the old ones. At stage 3 a state dict would hold empty tensors.

Methods are put on instances, bound to them: a deep copy of the module has its own, which act like torch's.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import torch
from torch.nn.utils import clip_grad, stateless

from bigtrain import zero
from bigtrain.errors import UsageError
from bigtrain.meeting import naming_the_lost

P = ParamSpec("P")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")
# What the same is called elsewhere, and where it goes here.
_ARGUMENTS = {
    "lr": "learning_rate", "config": "ds_config", "config_params": "ds_config", "optim": "optimizer", "scheduler": "lr_scheduler",
    "lr_scheduler_type": "lr_scheduler", "num_steps": "total_steps", "max_steps": "total_steps", "clip_grad": "max_grad_norm",
    "gradient_clipping": "max_grad_norm", "gradient_accumulation_steps": "accumulation", "batch_size": "micro_batch",
    "per_device_train_batch_size": "micro_batch",
}  # fmt: skip
_live: weakref.WeakSet[Misuse] = weakref.WeakSet()


def knows_its_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """An `__init__` that says of an argument it does not take which one is meant, and of one that it needs what it is.

    Raises:
        UsageError: where Python has a TypeError.
    """
    known = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > 2:
            raise UsageError(
                f"Engine(model, {type(args[2]).__name__}): the model alone is given by its place, all else by name: Engine(model, ds_config=..., "
                'learning_rate=...). The engine builds optimizer and schedule itself (optimizer="adamw", lr_scheduler="cosine").'
            )
        for name in kwargs:
            if name not in known:
                near = _ARGUMENTS.get(name) or next(iter(difflib.get_close_matches(name, known, n=1)), "")
                hint = f"write {near}=..." if near else f"it takes {', '.join(known[2:])}"
                raise UsageError(f"Engine({name}=...) is unknown: {hint}")
        if len(args) < 2 and "model" not in kwargs:
            raise UsageError("Engine(model, ds_config=...): no model was given: a torch.nn.Module, or what build_model makes.")
        if "ds_config" not in kwargs:
            raise UsageError(
                "Engine(model, ds_config=...): no ds_config was given: DeepSpeed's JSON as a path or a mapping, or a preset's name, such as "
                '"zero2" (bigtrain config generate writes one).'
            )
        with naming_the_lost():
            init(*args, **kwargs)

    return checked


def refuse_wrapped(model: Any) -> None:
    """Check that `model` is a module that nothing else shards, reduces or trains, and that no wrapper renames.

    Raises:
        UsageError: saying what to hand in.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"Engine(model): {type(model).__name__} is not a torch.nn.Module: hand in one, or what bigtrain.models.build_model makes of "
            "a folder, a name or a class."
        )
    kinds = {cls.__name__ for module in (model, *model.children()) for cls in type(module).__mro__}
    if wrappers := kinds.intersection(_WRAPPERS):
        raise UsageError(
            f"the model is in {sorted(wrappers)[0]}, which would reduce or shard gradients beside the engine: hand in the module inside "
            "(model.module); sharding comes from the ds_config's stage."
        )
    if "DeepSpeedEngine" in kinds:
        raise UsageError(
            "the model is a DeepSpeed engine: hand in the module inside (model.module), before deepspeed.initialize."
        )
    if any(type(p).__name__ == "DTensor" for p in model.parameters()):
        raise UsageError(
            "the model's parameters are DTensors (fully_shard): hand in plain ones; sharding comes from the ds_config."
        )
    if type(model).__name__ == "OptimizedModule":
        raise UsageError(
            "torch.compile(model) names every weight `_orig_mod.*`, in checkpoints and exports too: hand in the model itself, and compile "
            "its blocks with bigtrain.models.compile_blocks(model), at stages 0 to 2."
        )


def refuse_compiled(model: torch.nn.Module, stage: int) -> None:
    """Check that nothing in the model is compiled in place (`module.compile()`) at stage 3.

    Raises:
        UsageError: naming the first module that is.
    """
    compiled = [name or "the model" for name, m in model.named_modules() if _is_compiled(m)]
    if stage == 3 and compiled:
        raise UsageError(
            f"{compiled[0]} is compiled, and at stage 3 weights are gathered by hooks between and inside of modules, which a compiled "
            "graph does not wait for: use stage 0, 1 or 2, or leave compile() out."
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    """By torch's `compile()` or `torch.compile(...)`, or `bigtrain.models.compile_blocks`."""
    return any(getattr(module, name, None) is not None for name in ("_compiled_call_impl", "_bigtrain_compiled"))


_OWN_SCHEDULE = "the engine builds and steps them itself (optimizer=, lr_scheduler=, warmup_steps=, total_steps=); the rate now is engine.lr"
_CLIPS = "the engine clips itself (max_grad_norm=), and step() returns the norm (StepResult.grad_norm)"
# Names that scripts for plain torch, DeepSpeed or the Trainer ask an engine for -> what there is here.
_ELSEWHERE = {
    **dict.fromkeys(("optimizer", "lr_scheduler", "param_groups"), _OWN_SCHEDULE),
    **dict.fromkeys(("get_lr", "get_last_lr"), "use engine.lr"),
    **dict.fromkeys(("clip_grad_norm_", "get_global_grad_norm", "gradient_clipping"), _CLIPS),
    "zero_grad": "step() empties the gradients: leave it out",
    "forward": "call the engine itself: engine(**batch)",
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "float", "double", "bfloat16", "type"),
        "the engine has its rank's device and the ds_config's dtype (engine.device, engine.dtype): leave it out",
    ),
    "compile": "compile the model before: bigtrain.models.compile_blocks(model)",
    "requires_grad_": "freeze the model before the engine is made",
    "global_steps": "use engine.global_step",
    "gradient_accumulation_steps": "use engine.accumulation",
    "train_micro_batch_size_per_gpu": "use engine.micro_batch",
    "local_rank": "use engine.device",
    **dict.fromkeys(("save_pretrained", "save_16bit_model", "save_model"), "use engine.export(DIR)"),
    **dict.fromkeys(
        ("state_dict", "load_state_dict"), "use engine.save_checkpoint(DIR) and load_checkpoint(DIR), or engine.export(DIR)"
    ),
    **dict.fromkeys(("set_train_batch_size", "train_batch_size"), "it follows from micro_batch=, accumulation= and the ranks"),
}


class NotCopied:
    """What steps DeepSpeed's objects cannot be there twice. Names that it does not have say what there is instead."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that failed: what it failed with is told by nobody but itself
                return object.__getattribute__(self, name)
            module = getattr(self.__dict__.get("_ds"), "module", None)
            on_module = f"use engine.module.{name}" if not name.startswith("_") and hasattr(module, name) else ""
            instead = _ELSEWHERE.get(name) or on_module
            told = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{told}: {instead}" if instead else told)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lr":
            raise UsageError(
                f"engine.lr = {value!r}: the rate follows from learning_rate and the schedule, so that a run that goes on has the same. Give "
                "Engine(lr_scheduler=f) a function from the update's number to the factor on learning_rate."
            )
        object.__setattr__(self, name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "an Engine cannot be copied or pickled: copy engine.module (below stage 3), or use engine.save_checkpoint(dir)."
        )


class Misuse:
    """Watches one engine's module and DeepSpeed objects until `release`.

    Args:
        ds: DeepSpeed's engine.
        in_step: True while gradients are being accumulated.
        refuse: tells the other ranks, then raises.
    """

    def __init__(self, ds: Any, in_step: Callable[[], bool], refuse: Callable[[str], NoReturn]):
        self._in_step, self._refuse = in_step, refuse
        self._ours = False
        self._module: Callable[[], Any] = weakref.ref(ds.module)
        self._trained = {id(p) for p in ds.module.parameters() if p.requires_grad}
        self._handles: list[Any] = []
        self._put: list[tuple[Any, str, Any]] = []
        self._on(ds.module, zero_grad=self._zero_grad, _apply=self._converting)
        for part in ds.module.modules():
            if hasattr(type(part), "resize_token_embeddings"):
                self._on(part, resize_token_embeddings=self._resizing)
        self._on(ds, module_state_dict=self._inner("module_state_dict"))
        for target in (ds, ds.optimizer):
            self._on(target, step=self._inner("step", self._refuse_stepping))
            self._on(target, zero_grad=self._inner("zero_grad", self._refuse_emptying))
        if any(zero.is_partitioned(p) for p in ds.module.parameters()):
            self._handles = [ds.module.register_state_dict_pre_hook(self._empty)]
            zero.refuse_empty_reads(ds.module)
        _watch_clipping()
        _watch_functional_calls()
        _live.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Misuse:
        """A deep copy of the module has hooks that end here: it is not watched, and nothing of DeepSpeed's is copied for it."""
        return self

    @contextlib.contextmanager
    def ours(self) -> Iterator[None]:
        """What is called inside, the engine calls itself."""
        before, self._ours = self._ours, True
        try:
            yield
        finally:
            self._ours = before

    def release(self) -> None:
        """The engine is closed."""
        for handle in self._handles:
            handle.remove()
        for target, name, before in self._put:
            target.__dict__.pop(name, None)
            if before is not None:
                object.__setattr__(target, name, before)
        self._put = []
        _live.discard(self)

    def clipping(self, parameters: Any) -> None:
        """Refuse a clip of gradients that are not there."""
        if self._in_step() and any(id(p) in self._trained for p in parameters):
            self._refuse(
                "gradients were clipped between engine.backward() and engine.step(): they are reduced and put away during backward, so that "
                "would clip nothing, or a part. Give Engine(max_grad_norm=X); the norm before clipping is in step()'s result."
            )

    def _on(self, target: Any, **methods: Callable[..., Any]) -> None:
        for name, method in methods.items():
            self._put.append((target, name, target.__dict__.get(name)))
            object.__setattr__(target, name, types.MethodType(method, target))

    def _refuse_emptying(self) -> None:
        if self._in_step() and not self._ours:
            self._refuse(
                "zero_grad() between engine.backward() and engine.step(): the engine empties gradients itself after a step, and those of "
                "a step that has begun cannot be taken back. Leave zero_grad() out; a micro batch whose loss is not finite makes its "
                "step be skipped."
            )

    def _zero_grad(self, module: Any, set_to_none: bool = True) -> None:
        if module is self._module():
            self._refuse_emptying()
        type(module).zero_grad(module, set_to_none)

    def _refuse_stepping(self) -> None:
        if not self._ours:
            self._refuse("DeepSpeed's own step() was called: the engine counts and checks steps. Call engine.step().")

    def _inner(self, name: str, check: Callable[[], None] = lambda: None) -> Callable[..., Any]:
        """The method `name` of an object of DeepSpeed's behind a check; what it calls itself is not checked again."""

        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            check()
            before = next(b for t, n, b in self._put if t is target and n == name)
            with self.ours():
                return (before or types.MethodType(getattr(type(target), name), target))(*args, **kwargs)

        return call

    def _converting(self, module: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """`.to()`, `.half()`, `.cuda()` and their like; those that change nothing pass."""
        if module is self._module():
            kinds = {(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())}
            after = {kind: fn(torch.empty(0, dtype=kind[0], device=kind[1])) for kind in kinds}
            changed = [f"{k[0]} on {k[1]} to {t.dtype} on {t.device}" for k, t in after.items() if (t.dtype, t.device) != k]
            if changed:
                self._refuse(
                    f"the model was converted ({', '.join(sorted(changed))}) while an Engine trains it: no update would reach the new memory. "
                    "Choose dtype and device before (the ds_config's bf16, the rank's card), or convert a copy: copy.deepcopy(model), "
                    "or engine.export(dir, dtype=...)."
                )
        return type(module)._apply(module, fn, recurse)

    def _resizing(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers would put other memory under the same parameter; without a size it returns the embedding."""
        watched = self._module()
        if (args or kwargs) and watched is not None and any(part is module for part in watched.modules()):
            self._refuse(
                "resize_token_embeddings() while an Engine trains the model: its gradients and optimizer state have the old shape. Build "
                "the model with the size that the tokenizer needs: build_model(..., resize_vocab_to=N), in a run --resize_vocab."
            )
        return type(module).resize_token_embeddings(module, *args, **kwargs)

    def _empty(self, module: Any, _prefix: str, keep_vars: bool) -> None:
        """At stage 3; `keep_vars` asks for the parameters themselves, whatever they hold."""
        if keep_vars or self._ours or module is not self._module():
            return
        absent = [name for name, p in module.named_parameters() if not zero.is_available(p)]
        if absent:
            raise UsageError(
                f"state_dict() at stage 3: {absent[0]} and others are partitioned over the ranks, and would be empty tensors in it. Use "
                "engine.export(dir) or engine.save_checkpoint(dir); or call it inside bigtrain.zero.gathered(list(model.parameters()))."
            )


def _watch_clipping() -> None:
    """Let torch's clipping ask the engines first, whoever has imported it by its name already."""
    inner = getattr(clip_grad, "_clip_grads_with_norm_", None)  # torch 2.6 and later
    if inner is not None and not hasattr(inner, "asks_engines"):
        clip_grad._clip_grads_with_norm_ = _asking(inner)
    if not hasattr(clip_grad.clip_grad_value_, "asks_engines"):
        by_value = _asking(clip_grad.clip_grad_value_)
        clip_grad.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = by_value


def _asking(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def ask_first(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for engine in list(_live):
            engine.clipping(parameters)
        return clip(parameters, *args, **kwargs)

    ask_first.asks_engines = True  # type: ignore[attr-defined]
    return ask_first


def _watch_functional_calls() -> None:
    """`torch.func.functional_call` on what stage 3 has partitioned: DeepSpeed's hooks look for their own parameters and find tensors."""
    inner = stateless._functional_call
    if hasattr(inner, "tells_of_stage_3"):
        return

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        except AttributeError as error:
            if "'ds_" not in str(error):
                raise
            raise UsageError(
                f"torch.func.functional_call on a {type(args[0]).__name__} at stage 3: its weights are gathered by hooks, which other tensors "
                "in their place have nothing for. Use stage 0, 1 or 2, or write the computation with functions (torch.nn.functional)."
            ) from error

    call.tells_of_stage_3 = True  # type: ignore[attr-defined]
    stateless._functional_call = call
