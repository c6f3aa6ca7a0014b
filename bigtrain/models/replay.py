"""A block that keeps only its inputs: what its backward asks for is made by running the block once more.

The rules are those of torch.utils.checkpoint without reentrance: the second run sees the random numbers of the first, ends as soon
as it has made what is asked for, and must make tensors of the same shapes, dtypes and devices. That function costs the host a few
microseconds for each tensor that is saved, three times, and a few hundred for each block, most of them for random states. A block of
a language model saves 31, and where a micro batch is small the host is what a step waits for (docs/log.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from bigtrain.errors import ModelError

_Kind = tuple[torch.Size, torch.dtype, torch.device]
_States = list[tuple[torch.Generator, torch.Tensor]]


def replayed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` gives; `function` runs again in backward.

    Raises:
        ModelError: in backward, if the second run makes other tensors than the first, or an argument was changed in place since.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if _out_of_the_ordinary(args):
        return checkpointed(function, *args, **kwargs)
    run = _Run(function, args, kwargs)
    run.states = _random_states(args)
    with torch.autograd.graph.saved_tensors_hooks(run.note, run.take):
        out = function(*args, **kwargs)
    # Where nothing was drawn, nothing will be: the second run is then the same whatever the states are by that time.
    if all(torch.equal(state, now.get_state()) for now, state in run.states):
        run.states = []
    return out


def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's own checkpoint without reentrance, which brings back the random states of GPUs that its positional arguments lie on alone.

    A block that is called by names would draw another dropout in backward than in forward.
    """
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized() or _cards(args):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    return checkpoint(_without_first(function), torch.empty(0, device="cuda"), *args, use_reentrant=False, **kwargs)


def _without_first(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _first, *args, **kwargs: function(*args, **kwargs)


def _cards(args: tuple[Any, ...]) -> set[int]:
    """GPUs that arguments lie on."""
    return {a.device.index for a in args if isinstance(a, torch.Tensor) and a.is_cuda}


def _out_of_the_ordinary(args: tuple[Any, ...]) -> bool:
    """Whether there is more to bring back than random states, or somebody else looks at what is saved (a checkpoint around this)."""
    return (
        torch.compiler.is_compiling()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._len_torch_function_stack() > 0
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or any(isinstance(a, torch.Tensor) and a.device.type not in ("cpu", "cuda") for a in args)
    )


class _Enough(Exception):
    """Everything that was saved has been made again; the rest of the block need not run."""


class _Run:
    """One run of a block. Autograd keeps it alive as long as something that the block saved is needed.

    Attributes:
        states: of the random generators before it, if it drew from them.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._function, self._kwargs = function, kwargs
        # Cut off from the graph before: an argument that is changed in place inside would otherwise hold this run by its history.
        self._args = [_cut_off(a) if isinstance(a, torch.Tensor) else a for a in args]
        self._versions = [a._version if isinstance(a, torch.Tensor) else 0 for a in args]
        self._kinds: list[_Kind] = []
        self._made: list[torch.Tensor | None] = []
        self._graph = -1  # the backward that they were made for
        self.states: _States = []

    def note(self, tensor: torch.Tensor) -> int:
        """In the first run: in the place of a tensor, its number."""
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self._kinds) - 1

    def take(self, number: int) -> torch.Tensor:
        """In backward: the tensor of this number."""
        graph = torch._C._current_graph_task_id()
        if graph != self._graph or graph == -1 or self._made[number] is None:
            self._made, self._graph = list(self._again()), graph
        found, self._made[number] = self._made[number], None
        assert found is not None
        return found

    def _again(self) -> list[torch.Tensor]:
        if any(isinstance(a, torch.Tensor) and a._version != v for a, v in zip(self._args, self._versions)):
            raise ModelError(
                "an argument of a block that is recomputed in backward was changed in place after the block had run, or by the "
                "block itself: gradients would be wrong. Change a copy of it, or leave this block out of activation checkpointing"
            )
        made: list[torch.Tensor] = []
        kinds = self._kinds

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kind = (tensor.shape, tensor.dtype, tensor.device)
            if kind != kinds[len(made)]:
                raise ModelError(f"{_OTHER} number {len(made)} was {_told(kinds[len(made)])} and is {_told(kind)}. {_REMEDY}")
            # Without its history, or what is kept would keep this run's whole graph.
            tensor = tensor.detach() if tensor.requires_grad else tensor
            made.append(tensor)
            if len(made) == len(kinds):
                raise _Enough
            return tensor

        with contextlib.suppress(_Enough), _with_states(self.states), _no_autocast(), torch.enable_grad():
            with torch.autograd.graph.saved_tensors_hooks(keep, _as_it_is):
                self._function(*self._args, **self._kwargs)
        if len(made) < len(kinds):
            raise ModelError(f"{_OTHER} {len(kinds)} were saved in forward, {len(made)} in the second run. {_REMEDY}")
        return made


_OTHER = "a block that is recomputed in backward made other tensors than in forward:"
_REMEDY = "It must compute the same whenever it runs: look for counters, caches and random choices in it"


def _told(kind: _Kind) -> str:
    shape, dtype, device = kind
    return f"{list(shape)} {dtype} on {device}"


def _cut_off(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _random_states(args: tuple[Any, ...]) -> _States:
    """The default generators of the CPU and of the arguments' devices, and their states; of this rank's where they come by name."""
    devices = _cards(args) or ({torch.cuda.current_device()} if torch.cuda.is_initialized() else set())
    generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in sorted(devices))]
    return [(one, one.get_state()) for one in generators]


@contextlib.contextmanager
def _with_states(states: _States) -> Iterator[None]:
    now = [(one, one.get_state()) for one, _ in states]
    for one, state in states:
        one.set_state(state)
    try:
        yield
    finally:
        for one, state in now:
            one.set_state(state)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """As in forward, where it was off (see `_out_of_the_ordinary`), whatever it is around backward."""
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield
