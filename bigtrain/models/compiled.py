"""torch.compile of each decoder block, as an option: what it gains has to be measured (launch/grids/compile.yaml).

Compiled is what a block computes, its `forward` below transformers' own switch for activation checkpointing. That switch stands in the
class's `forward` in transformers 5.24 (the inner one is its `__wrapped__`) and in `__call__` in 5.17. All blocks of a class share their graphs: one in training, one in evaluation, one more for each shape and kind of layer.

Never slower or otherwise than asked without a word: a block that torch cannot put into one graph is an error that names it, and so is
one that meets more shapes or kinds in training than torch keeps graphs of. Attention that cannot be traced (bigtrain's own for packed
rows) runs between two graphs, which the log says. Generating, where each token is another shape, is not compiled, and nor are more than
a few shapes without gradients: they would take the graphs that training needs. What else a script compiles keeps torch's settings.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from bigtrain import zero
from bigtrain.errors import ModelError
from bigtrain.models import tiles
from bigtrain.whereabouts import HERE

logger = logging.getLogger(__name__)
GRAPHS = 16  # of one class of blocks: modes, shapes, kinds of layers; torch's own limit is 8, after which it runs uncompiled
EVALUATED = 4  # shapes without gradients that are compiled
_UNTRACED = ("bigtrain_varlen",)  # attention implementations that ask each batch where its documents begin


def compile_blocks(model: torch.nn.Module, backend: str = "inductor") -> int:
    """Compile the blocks that a transformers model declares; parameters keep their names.

    Args:
        model: as built, frozen, with checkpointing and kernels in place.
        backend: of torch.compile.

    Returns:
        How many blocks are compiled.

    Raises:
        ModelError: it has none, or is partitioned (stage 3). Later, in a block's first forward: torch cannot compile it.
    """
    if any(zero.is_partitioned(p) for p in model.parameters()):
        raise ModelError(
            "torch_compile at ZeRO stage 3: weights are gathered by hooks inside of a block, and a compiled block would read them before. "
            "Use stage 0, 1 or 2, or leave torch_compile out."
        )
    blocks = _blocks(model)
    if not blocks:
        raise ModelError(f"torch_compile: {type(model).__name__} declares no blocks to compile: leave torch_compile out")
    if tiled := [name for name, module in model.named_modules() if tiles.is_installed(module)]:
        raise ModelError(f"torch_compile: {tiled[0]} runs in tiles (mlp_tile_tokens): leave one of the two out", tiled)
    _ALIVE.watch()
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    whole, evaluated = _attention_is_traced(model), set[torch.Size]()
    for name, block in blocks:
        _compile(name, block, whole, backend, evaluated)
    parts = "as a whole" if whole else "around attention, which is not compiled"
    logger.info("torch.compile: %d blocks (%s), each %s", len(blocks), type(blocks[0][1]).__name__, parts)
    return len(blocks)


def is_compiled(block: torch.nn.Module) -> bool:
    """Whether `compile_blocks` has been at this block."""
    return "_bigtrain_compiled" in block.__dict__


def without_wrappers(model: torch.nn.Module) -> None:
    """Let the parts of a model that are in `torch.compile(part)` have their own names, without `_orig_mod.`: compiled is then what they compute.

    Raises:
        ModelError: a hook is on such a wrapper, which is left out.
    """
    parts: list[tuple[torch.nn.Module, str, Any]] = [
        (m, name, part) for m in model.modules() for name, part in m._modules.items()
    ]
    for parent, name, wrapper in parts:
        if type(wrapper).__name__ == "OptimizedModule":
            if any(hooks for key, hooks in wrapper.__dict__.items() if key.endswith("_hooks")):
                raise ModelError(
                    f"a hook is on torch.compile(...) of {name}: register it on the module inside, before compiling"
                )
            parent._modules[name] = wrapper._orig_mod
            _compile_inside(wrapper._orig_mod, wrapper.dynamo_ctx)  # with its own mode, backend and options


def _compile_inside(part: Any, compiler: Callable[..., Any]) -> None:
    if is_compiled(part):  # at several places in the model
        return
    own = part.__dict__.get("forward")  # put on the instance: a method of it, or a function that knows it
    bound = own is not None and getattr(own, "__self__", None) is not part
    part._bigtrain_compiled = compiler(own if bound else getattr(own, "__func__", type(part).forward))
    part.forward = types.MethodType(_bound if bound else _plain, part)


def _bound(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._bigtrain_compiled(*args, **kwargs)


def _blocks(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]


def _attention_is_traced(model: Any) -> bool:
    """Whether attention can be part of a block's graph; where it cannot, dynamo is told to go around it."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name not in _UNTRACED:
        return True
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = ALL_ATTENTION_FUNCTIONS[name]
    if not hasattr(attend, "_torchdynamo_disable"):
        ALL_ATTENTION_FUNCTIONS.register(name, torch.compiler.disable(attend))
    return False


def _compile(name: str, block: Any, whole: bool, backend: str, evaluated: set[torch.Size]) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    if "forward" in block.__dict__:
        raise ModelError(
            f"torch_compile: block {name} has a forward of its own, put on the instance: leave torch_compile out", [name]
        )
    forward: Any = type(block).forward
    switch = "__call__" not in vars(GradientCheckpointingLayer)
    # Not bound to this block: a deep copy of the model must compute with its own weights.
    plain = forward.__wrapped__ if switch else forward
    run = _failing_at_the_limit(torch.compile(plain, dynamic=False, fullgraph=whole, backend=backend), whole)
    block._bigtrain_compiled = _unless_generating(plain, _naming(name, type(block).__name__, run), evaluated)
    block.forward = types.MethodType(_switched if switch else _plain, block)


def _switched(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The switch of transformers 5.24, around what is compiled; caches are off in training (`disable_cache`)."""
    run = functools.partial(self._bigtrain_compiled, self)
    if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
        return self._gradient_checkpointing_func(functools.partial(run, **kwargs), *args)
    return run(*args, **kwargs)


def _plain(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._bigtrain_compiled(self, *args, **kwargs)


def _failing_at_the_limit(run: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """A whole graph fails there in any case; parts would run uncompiled from then on. For these calls only: see the head."""
    return run if whole else torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)(run)


def _unless_generating(
    plain: Callable[..., Any], compiled: Callable[..., Any], evaluated: set[torch.Size]
) -> Callable[..., Any]:
    """`compiled`, or `plain` where tokens are generated; `evaluated`: shapes without gradients so far, of all blocks."""
    from transformers.cache_utils import Cache

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            given = (*args, *kwargs.values())
            if any(isinstance(value, Cache) for value in given):
                return plain(self, *args, **kwargs)
            shape = next(value.shape for value in given if isinstance(value, torch.Tensor))
            if shape not in evaluated:
                if len(evaluated) == EVALUATED:
                    _tell_once(
                        "torch.compile: blocks meet more than %d shapes without gradients; further ones run as they are",
                        EVALUATED,
                    )
                    return plain(self, *args, **kwargs)
                evaluated.add(shape)
        return compiled(self, *args, **kwargs)

    return call


@functools.cache
def _tell_once(text: str, *args: Any) -> None:
    logger.warning(text, *args)


def _naming(name: str, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's errors of compiling, as one that names the block."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            output = run(*args, **kwargs)
            _tell_breaks(name)
            return output
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise ModelError(
                f"torch_compile: block {name} ({kind}) has met more than {torch._dynamo.config.recompile_limit} shapes, modes or kinds of "
                "layers, each of which is compiled anew. Give it rows of one length (--packing isolated), or leave torch_compile out.",
                [name],
            ) from error
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise ModelError(
                f"torch_compile: block {name} ({kind}) cannot be compiled: {lines[0]} Leave torch_compile out for this "
                "model, or a kernel that torch cannot trace (--use_liger_kernel False).",
                [name],
            ) from error

    return call


_told: set[str] = set()


def _tell_breaks(name: str) -> None:
    """Say where dynamo left a block's graph, but for attention: it happens only where a block is not compiled as a whole."""
    reasons = torch._dynamo.utils.counters["graph_break"]
    if len(reasons) == len(_told):
        return
    for reason in set(reasons) - _told:
        _told.add(reason)
        if "torch.compiler.disable" not in reason:
            logger.warning("torch.compile: a part of block %s is not compiled: %s", name, " ".join(reason.split()))


class _Alive:
    """While torch compiles, nothing else moves on this rank, for minutes maybe: the watch must not take that for a hang."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._done.set()
        self._watches = False

    def watch(self) -> None:
        """Look after every compilation of this process; again changes nothing."""
        if not self._watches:
            self._watches = True
            torch._dynamo.callback.callback_handler.register_start_callback(self._begin)
            torch._dynamo.callback.callback_handler.register_end_callback(self._end)

    def _begin(self, _args: Any) -> None:
        done = self._done = threading.Event()
        threading.Thread(target=_tick, args=(done,), name="bigtrain-compiling", daemon=True).start()

    def _end(self, _args: Any) -> None:
        self._done.set()


def _tick(done: threading.Event) -> None:
    while not done.wait(1.0):
        HERE.touch()


_ALIVE = _Alive()
