"""Parts of a model that do not train: frozen by name, or a separate module with its own checkpoint.

A frozen part gets no gradient and no optimizer state, and stays in eval mode whatever `model.train()` says, so that a
BatchNorm in it does not move and a dropout in it does nothing. Checkpoints are always restored onto the CPU with
restricted unpickling; the values reach a device only with the rank that owns it.
"""

from __future__ import annotations

import difflib
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from bigtrain.errors import ModelError, WeightsError

logger = logging.getLogger(__name__)


def freeze(model: torch.nn.Module, prefixes: Sequence[str], quiet: bool = False) -> tuple[str, ...]:
    """Freeze every parameter under the given module or parameter names; returns the frozen parameters' names.

    A prefix is whole dotted segments from the start ("model.vision_tower"); one that starts nothing is looked for further
    inside ("vision_tower" finds "model.vision_tower"). `quiet`: do not log what it finds.

    Raises:
        ModelError: a prefix matches no parameter, or nothing would be left to train.
    """
    if isinstance(prefixes, str):
        prefixes = (prefixes,)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules())
    for prefix in prefixes:
        roots = _roots(prefix, parameters, modules)
        logger.log(logging.DEBUG if quiet else logging.INFO, "frozen %r: %s", prefix, ", ".join(roots))
        for root in roots:
            if root in modules:
                freeze_module(modules[root])
            else:
                parameters[root].requires_grad_(False)
    if prefixes and not any(p.requires_grad for p in parameters.values()):
        raise ModelError(f"freeze={tuple(prefixes)} leaves no parameter to train.", tuple(prefixes))
    return tuple(name for name, p in parameters.items() if not p.requires_grad)


def _roots(prefix: str, parameters: Mapping[str, Any], modules: Mapping[str, torch.nn.Module]) -> list[str]:
    prefix = prefix.strip(".")
    names = [n for n in [*modules, *parameters] if n]
    if prefix in names:
        return [prefix]
    inner = [n for n in names if n.endswith("." + prefix)]
    if prefix and inner:
        return inner
    segments = sorted({n for n in names} | {n.rsplit(".", 1)[-1] for n in names})
    near = difflib.get_close_matches(prefix, segments, 5, cutoff=0.5) or [n for n in modules if n and "." not in n]
    raise ModelError(f"freeze: no module or parameter is named {prefix!r}; nearest: {', '.join(near)}.", [prefix])


def _stay_in_eval(self: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return self


def freeze_module(module: torch.nn.Module) -> torch.nn.Module:
    """No gradient for its parameters, and eval mode for good. Returns the module."""
    module.requires_grad_(False)
    module.eval()
    for part in module.modules():
        part.train = types.MethodType(_stay_in_eval, part)  # type: ignore[method-assign]
    return module


def frozen_module(
    module_or_builder: torch.nn.Module | Callable[[], torch.nn.Module],
    checkpoint: str | Path | None = None,
    *,
    key: str | None = None,
    strip_prefix: str | None = None,
) -> torch.nn.Module:
    """A frozen sub-model with the values of its own checkpoint, for use as a part of a larger model.

    Call it where the part is made, inside the callable given to `build_model`: at stage 3 its values go into the partitions
    like all others. Elsewhere it is a plain module on the CPU that moves with the model it is put into.

    Args:
        module_or_builder: the module, or a callable that makes it.
        checkpoint: .safetensors, or .pt / .bin / .ckpt as torch saves it (a Lightning checkpoint's "state_dict" is found).
        key: dotted path to the state dict inside the checkpoint, if it is another one.
        strip_prefix: keep only names that start so, without it. None: found from the names, if there is one.

    Raises:
        WeightsError: the checkpoint cannot be read without running code from it.
        ModelError: its names or shapes do not match the module.
    """
    module = module_or_builder if isinstance(module_or_builder, torch.nn.Module) else module_or_builder()
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"frozen_module: the builder returned a {type(module).__name__}, not an nn.Module.")
    if checkpoint is not None:
        load_checkpoint(module, checkpoint, key=key, strip_prefix=strip_prefix)
    return freeze_module(module)


def load_checkpoint(
    module: torch.nn.Module, checkpoint: str | Path, *, key: str | None = None, strip_prefix: str | None = None
) -> None:
    """Copy a checkpoint's values into a module, all names and shapes matching (arguments as in `frozen_module`)."""
    path = Path(checkpoint)
    values = _strip(_state_dict(_read(path), path, key), module, path, strip_prefix)
    wanted = module.state_dict(keep_vars=True)
    missing, unexpected = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
    shapes = [
        f"{n}: {tuple(values[n].shape)} in the file, {tuple(wanted[n].shape)} in the module"
        for n in values.keys() & wanted.keys()
        if hasattr(wanted[n], "shape") and values[n].shape != wanted[n].shape
    ]
    if missing or unexpected or shapes:
        raise ModelError(
            f"{path} does not match {type(module).__name__}:"
            + _listing("not in the file", missing)
            + _listing("not in the module", unexpected)
            + _listing("different shape", sorted(shapes)),
            [*missing, *unexpected],
        )
    module.load_state_dict(values)


def _listing(what: str, names: list[str]) -> str:
    return f"\n  {what} ({len(names)}): {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else ""


def _read(path: Path) -> Any:
    if not path.is_file():
        raise WeightsError(f"there is no checkpoint {path}.", file=str(path))
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path, device="cpu")
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise WeightsError(
            f"{path} holds Python objects besides tensors, and loading them would run code from the file. Re-save it where you "
            f"trust it: torch.save(torch.load(path, weights_only=False)['state_dict'], new_path).\n{error}",
            file=str(path),
        ) from error
    except Exception as error:
        raise WeightsError(f"{path} cannot be read: {error}", file=str(path)) from error


def _state_dict(content: Any, path: Path, key: str | None) -> dict[str, torch.Tensor]:
    found = content
    for segment in key.split(".") if key else ():
        if not isinstance(found, Mapping) or segment not in found:
            have = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
            raise WeightsError(f"{path} has no key {key!r}; there is: {have}.", file=str(path))
        found = found[segment]
    if key is None and isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)} if isinstance(found, Mapping) else {}
    if not tensors:
        have = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise WeightsError(
            f"{path} holds no tensors under {key or 'its top level'}; there is: {have}. Give key=.", file=str(path)
        )
    return tensors


def _strip(values: dict[str, torch.Tensor], module: torch.nn.Module, path: Path, prefix: str | None) -> dict[str, torch.Tensor]:
    if prefix is None:
        wanted = list(module.state_dict(keep_vars=True))
        if not wanted or set(wanted) <= values.keys():
            return values
        ends = [name.removesuffix(wanted[0]) for name in values if name.endswith(wanted[0])]
        prefix = next((e for e in ends if all(e + name in values for name in wanted)), "")
    kept = {name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)}
    if not kept:
        raise WeightsError(f"{path}: no name starts with {prefix!r}; the first is {next(iter(values))!r}.", file=str(path))
    return kept
