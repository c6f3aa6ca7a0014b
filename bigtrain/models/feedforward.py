"""The feed-forward parts of a model, found by what they are and tried before they are computed in tiles."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import torch

from bigtrain import ranks, zero
from bigtrain.errors import ModelError
from bigtrain.models import tiles
from bigtrain.models.checkpointing import blocks_of, declared_blocks
from bigtrain.models.compiled import is_compiled
from bigtrain.models.moe import routes_inside

logger = logging.getLogger(__name__)


def tile_mlp(model: torch.nn.Module, tokens: int, classes: Sequence[type | str] | type | str | None = None) -> int:
    """Compute the feed-forward part of each block over tiles of tokens, see `bigtrain.models.tiles`.

    Call it after what replaces modules' forwards (`use_liger`), before the engine exists. Values are those of the whole up to the
    order of fp32 sums; parameters keep their names.

    Args:
        model: a transformers model, or any module if `classes` is given.
        tokens: of one tile.
        classes: classes, or names of classes, of the feed-forward parts. None: in each block that the transformers model declares,
            the part with weights that takes nothing but the hidden states.

    Returns:
        How many parts run in tiles.

    Raises:
        ModelError: a block has no such part, or its part cannot be computed token by token; the module is named.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ModelError(f"mlp_tile_tokens is {tokens!r}: a whole number of at least 1 is needed")
    if whole := [name for name, module in model.named_modules() if is_compiled(module)]:
        raise ModelError(f"mlp_tile_tokens: block {whole[0]} is compiled (torch_compile): leave one of the two out", whole)
    parts = feed_forwards(model, classes)
    for part in parts.values():
        tiles.install(part, tokens)
        zero.mark_leaf(part)  # all weights of the part are gathered as it begins, not module by module and tile by tile
    logger.info("%d feed-forward parts run in tiles of %d tokens, first %s", len(parts), tokens, next(iter(parts)))
    return len(parts)


def feed_forwards(
    model: torch.nn.Module, classes: Sequence[type | str] | type | str | None = None
) -> dict[str, torch.nn.Module]:
    """Name and module of each feed-forward part, as `tile_mlp` takes them; also of a model without values.

    Raises:
        ModelError: as `tile_mlp`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    if classes is not None:
        given = [classes] if isinstance(classes, (type, str)) else list(classes)
        found = {names[id(part)]: part for part in blocks_of(model, given)}
    else:
        found = _of_blocks(model, names)
    tried: set[object] = set()
    for name, part in found.items():
        reason = _why_not(part) or (None if _kind(part) in tried else _why_not_by_trial(part))
        if reason is not None:
            raise ModelError(
                f"mlp_tile_tokens: {name} ({type(part).__name__}) cannot be computed in tiles: {reason}. Leave mlp_tile_tokens out",
                [name],
            )
        tried.add(_kind(part))
    return found


def _of_blocks(model: torch.nn.Module, names: dict[int, str]) -> dict[str, torch.nn.Module]:
    blocks = declared_blocks(model)
    if not blocks:
        raise ModelError(
            f"mlp_tile_tokens: {type(model).__name__} declares no blocks: name the class of its feed-forward parts"
        )
    found: dict[str, torch.nn.Module] = {}
    for block in blocks:
        inside = _outermost(block)
        if not inside:
            name = names[id(block)]
            raise ModelError(
                f"mlp_tile_tokens: {name} ({type(block).__name__}) has no feed-forward module of its own, one that takes the hidden "
                "states and nothing else, so it cannot be computed in tiles. Leave mlp_tile_tokens out",
                [name],
            )
        found |= {names[id(part)]: part for part in inside}
    return found


def _outermost(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The candidates in a block that lie in no other."""
    found: list[torch.nn.Module] = []
    for child in module.children():
        found += [child] if _is_candidate(child) else _outermost(child)
    return found


def _is_candidate(module: torch.nn.Module) -> bool:
    """Two matrices at least, and a forward with one argument: attention takes positions and masks beside the hidden states."""
    if sum(len(zero.full_shape(p)) > 1 for p in module.parameters()) < 2:
        return False
    try:
        arguments = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(arguments) == 1 and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _why_not(part: torch.nn.Module) -> str | None:
    if drops := tiles.random_parts(part):
        return f"{drops[0]}; set it to 0 in the model's config"
    if routes_inside(part) or any(len(zero.full_shape(p)) > 2 for p in part.parameters()):
        return "it routes tokens to experts"
    return None


def _kind(part: torch.nn.Module) -> object:
    """What the trial depends on."""
    shapes = tuple((name, zero.full_shape(p)) for name, p in part.named_parameters())
    return type(part), getattr(part.__dict__.get("forward"), "__func__", None), shapes


def _why_not_by_trial(part: torch.nn.Module) -> str | None:
    """Run it once on three tokens, one of them without a number: whatever mixes tokens carries that to the others.

    With weights of one value each, which take no memory: those of the model may be elsewhere, or not there yet.
    """
    params = dict(part.named_parameters())
    first = next(zero.full_shape(p) for p in params.values() if len(zero.full_shape(p)) > 1)
    problems = []
    for width in dict.fromkeys((first[-1], first[0])):  # torch's matrices are [out, in], GPT-2's are [in, out]
        try:
            return _tried(part, params, width)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    return f"it does not run on [1, tokens, width] alone ({problems[0].splitlines()[0]})"


def _tried(part: torch.nn.Module, params: dict[str, torch.nn.Parameter], width: int) -> str | None:
    away = any(p.is_meta for p in params.values())
    device = torch.device("cpu") if away else ranks.device()
    values = {n: torch.full((), 0.01, dtype=p.dtype, device=device).expand(zero.full_shape(p)) for n, p in params.items()}
    values |= {n: torch.zeros(b.shape, dtype=b.dtype, device=device) for n, b in part.named_buffers()}
    dtype = next(p.dtype for p in params.values() if len(zero.full_shape(p)) > 1)
    x = torch.ones(1, 3, width, dtype=dtype, device=device)
    x[0, 1] = float("nan")
    with torch.no_grad():
        out = torch.func.functional_call(part, values, (x,))
    if not isinstance(out, torch.Tensor) or out.shape != x.shape:
        return "it gives more, or another shape, than a tensor like its input"
    if out[0, [0, 2]].isnan().any() or not out[0, 1].isnan().all():
        return "what it makes of a token depends on other tokens"
    return None
