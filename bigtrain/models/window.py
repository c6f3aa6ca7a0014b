"""Build a model of any size with the plain constructor, never whole: a bounded window of whole parameters.

Every rank runs the same constructor with the same random numbers. A parameter joins the window when a module registers
it. When the window holds more than its limit, the parameter that was used longest ago is *parked*: this rank keeps its
own flat slice, and the parameter's data becomes a one-element tensor expanded to the full shape, so that shape, dtype and
device still read right and nothing else is there. Whatever torch operation then touches a parked parameter (an init that
needs fan-in, a padding row set to zero, a parent that initialises its children again, `model.apply`, numpy, a resize)
finds it whole again: the slices of all ranks are gathered first. Ranks touch parameters in the same order, so the
gathering is symmetric and no value is ever broadcast. What is parked and when follows from the order of operations alone,
never from reference counts or garbage collection, which differ between ranks: a parameter that still has live views is
parked like the others, but its data is left where the views see it, and its slice is cut when it is next needed.

Slices stay in the dtype that the constructor drew until the very end, so values are bit for bit those of a plain build.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from bigtrain import ranks
from bigtrain.errors import ModelError
from bigtrain.partition import owned_range, partition_size
from bigtrain.plan.constants import WINDOW_BYTES

_SAMPLE_ELEMS = 4096

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "_version", "is_cuda",
    "is_meta", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_xpu", "is_mps", "itemsize", "nbytes", "names",
    "retains_grad", "output_nr", "_backward_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "ndimension", "is_floating_point", "is_complex", "is_signed",
    "get_device", "requires_grad_", "__len__", "__hash__", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor",
    "register_hook", "register_post_accumulate_grad_hook", "zero_grad",
)  # fmt: skip
_FILL_METHODS = (
    "normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_",
    "random_",
)  # fmt: skip
_INIT_MODULES = ("torch.nn.init", "transformers.initialization")
_FILL_INITS = ("uniform_", "normal_", "constant_", "kaiming_uniform_")


def _metadata() -> set[Any]:
    """Everything that reads or sets what a parked parameter still has: answered without gathering."""
    getters = {getattr(Tensor, n).__get__ for n in _PROPERTIES if hasattr(Tensor, n)}
    setters = {Tensor.requires_grad.__set__, Tensor.grad.__set__}  # type: ignore[attr-defined, union-attr]
    methods = {getattr(Tensor, n) for n in _METHODS if hasattr(Tensor, n)}
    return getters | setters | methods | {torch.is_floating_point, torch.is_complex, torch.numel}


_METADATA = _metadata()
_FILLS = {getattr(Tensor, n) for n in _FILL_METHODS}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _overwrites(func: Any) -> bool:
    """True for operations that set every element of their first argument without reading it."""
    if func in _FILLS:
        return True
    # By name: transformers puts its own functions in place of torch.nn.init's while it initialises.
    return getattr(func, "__name__", "") in _FILL_INITS and getattr(func, "__module__", "") in _INIT_MODULES


@dataclass
class Parked:
    """What is left of a parameter outside the window."""

    shape: torch.Size
    dtype: torch.dtype
    shard: Tensor | None  # this rank's flat slice, padding included; None if the build draws no values
    sample: int = 0  # a checksum that every rank must share
    kept: bool = False  # the data is still whole, because views of it are alive on this rank


def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of `shape` that takes one element; not a number, so that a read that slips through is seen."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)  # of no dimensions: it expands to a scalar too


def _storage_users(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_ALONE = _storage_users(Parameter(torch.empty(1)))


def _dead() -> None:
    """Stands for a parameter that left the window."""


class Window(TorchFunctionMode):
    """Context in which modules are built; see the module's docstring.

    Args:
        limit_bytes: whole parameters held at once; the parameters of the running operation always stay.
        shard_device: where slices live during the build; None: where the parameter was.
        draw: False for a skeleton, whose values a loader sets later: whole-tensor fills are skipped and nothing is kept.
    """

    active = False  # one build at a time

    def __init__(self, *, limit_bytes: int = WINDOW_BYTES, shard_device: torch.device | None = None, draw: bool = True):
        super().__init__()
        self.limit_bytes = limit_bytes
        self.draw = draw
        self.peak_bytes = 0
        self._shard_device = shard_device
        self._rank, self._world = ranks.rank(), ranks.world_size()
        self._token = object()  # tells this window's parameters from an earlier one's
        self._watched: list[Callable[[], Parameter | None]] = []  # every parameter seen, by key
        self._whole: OrderedDict[int, int] = OrderedDict()  # key -> bytes, used longest ago first
        self._bytes = 0
        self._exit = contextlib.ExitStack()

    # -- entering and leaving

    def __enter__(self) -> Window:
        if Window.active:
            raise ModelError("a model is being built already: call build_model outside of the callable given to build_model.")
        with contextlib.ExitStack() as stack:
            handle = register_module_parameter_registration_hook(self._on_register)
            stack.callback(handle.remove)
            stack.enter_context(self._seeing_copies())
            super().__enter__()
            self._exit = stack.pop_all()
        Window.active = True
        return self

    def __exit__(self, *exc: Any) -> None:
        Window.active = False
        try:
            super().__exit__(*exc)
        finally:
            self._exit.close()

    def _on_register(self, module: torch.nn.Module, name: str, param: Any) -> None:
        if isinstance(param, Parameter):
            self.admit(param)

    @contextlib.contextmanager
    def _seeing_copies(self) -> Iterator[None]:
        """Two ways to a new parameter that no mode sees: `copy.deepcopy(layer)` and `Parameter(other_parameter)`."""
        deepcopy, new = Parameter.__dict__["__deepcopy__"], Parameter.__dict__["__new__"]

        def deepcopy_into_window(param: Parameter, memo: dict[int, Any]) -> Parameter:
            known = id(param) in memo
            result = deepcopy(param, memo)
            if not known:
                self.admit(result)
            return result

        def new_from_whole(cls: type[Parameter], data: Any = None, *args: Any, **kwargs: Any) -> Parameter:
            if isinstance(data, Parameter) and self._knows(data):
                self._fetch(data, values=True)
            return new.__func__(cls, data, *args, **kwargs)

        Parameter.__deepcopy__ = deepcopy_into_window  # type: ignore[method-assign, assignment]
        Parameter.__new__ = new_from_whole  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
            Parameter.__new__ = new  # type: ignore[method-assign]

    # -- what torch does to parameters

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = [p for p in _parameters_in((args, kwargs)) if self._knows(p)]
        if not touched or func in _METADATA:
            return func(*args, **kwargs)
        target = args[0] if args else kwargs.get("tensor")
        if func is _SET_DATA and target is touched[0]:
            return self._set_data(func, args)
        filled = _overwrites(func) and target is touched[0]
        if filled and not self.draw:
            return target
        for position, param in enumerate(touched):
            self._fetch(param, values=not (filled and position == 0))
        result = func(*args, **kwargs)
        self._shrink(keep=touched)
        return result

    def _set_data(self, func: Any, args: tuple[Any, ...]) -> None:
        param, value = args
        if isinstance(value, Parameter) and self._knows(value):
            self._fetch(value, values=True)
        self._drop(param.__dict__["_bigtrain_key"][1])
        param.__dict__.pop("_bigtrain_parked", None)
        func(*args)
        self._hold(param)
        self._shrink(keep=[param] if self.draw else [])

    def _knows(self, param: Parameter) -> bool:
        return param.__dict__.get("_bigtrain_key", (None,))[0] is self._token

    # -- in and out of the window

    def admit(self, param: Parameter) -> None:
        """Watch a parameter whose data is whole."""
        if self._knows(param) or not can_be_parked(param):
            return
        if not self.draw:
            param._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves it alone
        self._watch(param)
        self._hold(param)
        self._shrink(keep=[param] if self.draw else [])

    def _watch(self, param: Parameter) -> None:
        param._bigtrain_key = (self._token, len(self._watched))  # type: ignore[attr-defined]
        self._watched.append(weakref.ref(param))

    def _hold(self, param: Parameter) -> None:
        with torch._C.DisableTorchFunction():
            nbytes = param.numel() * param.element_size()
        self._whole[param.__dict__["_bigtrain_key"][1]] = nbytes
        self._bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _drop(self, key: int) -> None:
        self._bytes -= self._whole.pop(key, 0)

    def _shrink(self, keep: Iterable[Parameter]) -> None:
        """Park the parameters used longest ago until the limit holds. One that died counts until its turn comes."""
        limit = self.limit_bytes if self.draw else 0
        if self._bytes <= limit:
            return
        kept = {p.__dict__["_bigtrain_key"][1] for p in keep if self._knows(p)}
        for key in list(self._whole):
            if self._bytes <= limit:
                return
            if key in kept:
                continue
            param = self._watched[key]()
            if param is None:
                self._drop(key)
            else:
                self._park(param)

    def _park(self, param: Parameter) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            self._drop(param.__dict__["_bigtrain_key"][1])
            parked = Parked(param.shape, param.dtype, None, kept=_storage_users(param) > _ALONE)
            param._bigtrain_parked = parked  # type: ignore[attr-defined]
            if not parked.kept:
                self._cut(param, parked)

    def _cut(self, param: Parameter, parked: Parked) -> None:
        """From whole data to this rank's slice."""
        data = param.data
        if self.draw:
            parked.shard = _own_slice(data, self._rank, self._world, self._shard_device or data.device)
            parked.sample = _sample(data)
        parked.kept = False
        param.data = _placeholder(data.shape, data.dtype, data.device)

    def close(self, param: Parameter) -> Parked:
        """Take the parameter out for good, cut even if views are alive; returns what this rank keeps of it."""
        key = param.__dict__.pop("_bigtrain_key", None)
        parked: Parked | None = param.__dict__.pop("_bigtrain_parked", None)
        if key is not None and key[0] is self._token:
            self._drop(key[1])
            self._watched[key[1]] = _dead
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if parked is None:
                parked = Parked(param.shape, param.dtype, None, kept=True)
            if parked.kept:
                self._cut(param, parked)
        return parked

    def restore_others(self) -> int:
        """Make whole what was built in the window but is no part of the model (a teacher hidden in a list). Collective.

        Call it after every parameter of the model was closed. Returns how many parameters that were.
        """
        alive, everywhere = self._alive_everywhere()
        if everywhere:  # perhaps only in garbage; collecting walks every object of every library, so not without need
            gc.collect()
            alive, everywhere = self._alive_everywhere()
        for key in sorted(everywhere):
            self._fetch(alive[key], values=True)
            del alive[key]._bigtrain_key  # type: ignore[attr-defined]
        return len(everywhere)

    def _alive_everywhere(self) -> tuple[dict[int, Parameter], set[int]]:
        """This rank's watched parameters that live, by key, and the keys that live on every rank. Collective."""
        alive = {k: p for k, ref in enumerate(self._watched) if (p := ref()) is not None}
        return alive, set.intersection(*map(set, ranks.all_gather_object(list(alive))))

    def _fetch(self, param: Parameter, values: bool) -> None:
        """Make a parameter whole; `values=False`: it is about to be overwritten."""
        parked: Parked | None = param.__dict__.get("_bigtrain_parked")
        if parked is None:
            self._whole.move_to_end(param.__dict__["_bigtrain_key"][1])
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if not values or not self.draw or (parked.shard is None and not parked.kept):
                if not parked.kept:
                    param.data = torch.empty(parked.shape, dtype=parked.dtype, device=param.device)
            elif parked.kept:  # the other ranks may need this one's slice
                gather(_own_slice(param.data, self._rank, self._world, param.device), parked.shape, param.device)
            else:
                assert parked.shard is not None
                param.data = gather(parked.shard, parked.shape, param.device)
        del param._bigtrain_parked  # type: ignore[attr-defined]
        self._hold(param)

    # -- continuing with parameters that were built before

    def resume(self, param: Parameter, shape: torch.Size, dtype: torch.dtype, shard: Tensor | None) -> None:
        """Take in a parameter that was cut before: `shard` is this rank's flat slice; None: it has no value yet."""
        with torch._C.DisableTorchFunction():
            param.data = _placeholder(shape, dtype, param.device)
            shard = None if shard is None else shard.to(dtype)
        self._watch(param)
        param._bigtrain_parked = Parked(shape, dtype, shard)  # type: ignore[attr-defined]


def can_be_parked(param: Parameter) -> bool:
    """Plain dense parameters; not lazy, quantized or meta ones, nor those that ZeRO-3 already owns."""
    with torch._C.DisableTorchFunction():
        lazy = isinstance(param, UninitializedTensorMixin)
        return not (lazy or hasattr(param, "ds_id") or param.is_meta or param.is_sparse or param.is_quantized)


def _parameters_in(value: Any) -> Iterator[Parameter]:
    if isinstance(value, Parameter):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _parameters_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _parameters_in(item)


def _own_slice(data: Tensor, rank: int, world: int, device: torch.device) -> Tensor:
    """This rank's flat slice of `ceil(numel / world)` elements, padding set to zero (DeepSpeed leaves it unset)."""
    if world == 1 and data.device == device:
        return data.reshape(-1)
    shard = torch.empty(partition_size(data.numel(), world), dtype=data.dtype, device=device)
    start, stop = owned_range(data.numel(), rank, world)
    shard[: stop - start].copy_(data.reshape(-1)[start:stop])
    shard[stop - start :].zero_()
    return shard


def gather(shard: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    """The whole tensor on `device`, from every rank's flat slice. Collective."""
    world = ranks.world_size()
    if shape.numel() == 0:
        return torch.empty(shape, dtype=shard.dtype, device=device)
    shard = shard.to(device)
    flat = shard
    if world > 1:
        flat = torch.empty(world * shard.numel(), dtype=shard.dtype, device=device)
        group = ranks.control_group() if device.type == "cpu" else None
        torch.distributed.all_gather(list(flat.chunk(world)), shard, group=group)
    return flat[: shape.numel()].view(shape)


def _sample(data: Tensor) -> int:
    """A checksum of at most a few thousand elements' bits: enough to see that ranks drew different numbers."""
    flat = data.reshape(-1)[:: max(1, data.numel() // _SAMPLE_ELEMS)].contiguous()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
    if integer is None:
        return 0
    bits = flat.view(integer).to(torch.int64)
    return int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())
