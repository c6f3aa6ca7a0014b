"""How documents in one row are kept apart in attention, for each attention implementation of transformers.

What transformers does with packed rows (read in masking_utils.py and modeling_flash_attention_utils.py, 5.17 and 5.24):

* sdpa, eager, flex: without an attention mask and *without a cache*, `find_packed_sequence_indices` sees where
  `position_ids` do not go up by one and masks across documents, row by row, at any batch size. With `use_cache=True`, the
  default of most configs, a cache object is made even in training and the packing is silently ignored. For sdpa the mask
  is dense: seq_len**2 bytes a row, and fast causal kernels are out.
* flash attention: `position_ids` count at batch size 1 only; larger micro batches attend across documents silently. With
  `cu_seq_lens_q/k` and `max_length_q/k` in the call it is right at any batch size (`StepLoader(document_bounds=True)`).
* `bigtrain_varlen`, registered here: document bounds from `position_ids` for any micro batch and no dense mask, sliding
  windows included; fused kernels on CUDA (see `kernels.packed_rows.attend`), one causal sdpa call per document elsewhere.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigtrain.data.isolation_choice import VARLEN, Isolation, isolation_for
from bigtrain.errors import DataError
from bigtrain.kernels import documents as packed
from bigtrain.kernels.cudnn_attention import DTYPES
from bigtrain.kernels.documents import Documents
from bigtrain.kernels.packed_rows import attend, per_document, visible
from bigtrain.kernels.sinks import plain_with_sinks


def prepare_isolation(model: torch.nn.Module, packing: str) -> Isolation:
    """Makes a transformers model honour packed rows; call it once after building, before the first forward.

    Switches `config.use_cache` off, without which packed positions are ignored. Modules without a `config` that do not
    come from transformers are left alone: what they do with `position_ids` is theirs.

    Raises:
        DataError: see `isolation_for`; also when the model's forward takes no `position_ids`. By the first forward with
            `position_ids`, if they reach neither the masks nor the attention (OPT makes a mask of its own, for instance).
    """
    config = getattr(model, "config", None)
    if packing != "isolated" or config is None or not hasattr(config, "model_type"):
        return Isolation("none needed", False, f"packing {packing}: nothing to prepare in {type(model).__name__}")
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise DataError(
            f"{type(model).__name__}.forward takes no position_ids, so packed documents cannot be told apart; use "
            "packing='none' or packing='concatenate'"
        )
    choice = isolation_for(config, packing)
    if choice.method == "position_ids":
        _listen_to_masks()
        _check_first_forward(model)
    config.use_cache = False
    if hasattr(config, "get_text_config"):
        config.get_text_config().use_cache = False
    return choice


def _check_first_forward(model: torch.nn.Module) -> None:
    """See that the first forward with `position_ids` asks for documents: some models do not pass them on, and nothing would tell."""
    asked: list[int] = []

    def now() -> int:
        return packed.asked_by["attention" if model.config._attn_implementation == VARLEN else "masks"]  # type: ignore[union-attr]

    def before(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        own = any(kwargs.get(name) is not None for name in ("attention_mask", "past_key_values")) or kwargs.get("use_cache")
        asked[:] = [] if own or kwargs.get("position_ids") is None else [now()]

    def after(module: torch.nn.Module, *_: Any) -> None:
        if not asked:
            return
        if now() == asked[0]:
            raise DataError(
                f"{type(module).__name__} with attn_implementation={model.config._attn_implementation!r} does not pass "  # type: ignore[union-attr]
                "position_ids on, so documents in a row would see each other; use another attn_implementation (sdpa, eager, "
                f"{VARLEN}), or packing='none' or packing='concatenate'"
            )
        for hook in hooks:
            hook.remove()

    hooks = (model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after))


def _listen_to_masks() -> None:
    """Put `_packed_indices` around transformers' function, once."""
    from transformers import masking_utils

    find = getattr(masking_utils, "find_packed_sequence_indices", None)
    if find is not None and not getattr(find, "of_bigtrain", False):
        masking_utils.find_packed_sequence_indices = _packed_indices(find)  # type: ignore[assignment]


def _packed_indices(original: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """transformers' `find_packed_sequence_indices`, which asks the device whether there is more than one document in a row."""

    @functools.wraps(original)
    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        packed.asked_by["masks"] += 1
        found = packed.cache.known(position_ids)
        if found is None:
            return original(position_ids)
        if found.one_a_row:
            return None
        return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)

    find.of_bigtrain = True  # type: ignore[attr-defined]
    return find


def _documents_in(kwargs: dict[str, Any], batch: int, length: int) -> Documents | None:
    """Documents by the attention call's arguments; None when they do not tell any."""
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is not None:
        return packed.cache.of(bounds, batch, length, is_bounds=True)
    positions = kwargs.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.shape[-1] != length:
        return None
    return packed.cache.of(positions, batch, length, is_bounds=False)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attention_path: str = "auto",
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers attention interface: causal attention inside documents only, without a dense mask.

    Args:
        query: [batch, heads, seq_len, head_dim]; key and value may have fewer heads (grouped).
        attention_mask: None, or what stands for a sliding window (`_window_sign`); with any other (padded generation, for
            instance) sdpa takes over.
        attention_path: the kernels on a GPU, "auto" or one that tests and benchmarks force; see `kernels.packed_rows.attend`.
        kwargs: `position_ids` [batch, seq_len], or `cu_seq_lens_q` of the flattened batch; `s_aux` [heads], sinks.

    Returns:
        [batch, seq_len, heads, head_dim of value], and None for the attention weights.

    Raises:
        DataError: the model caps its scores or picks keys for each query; it has a window, packed rows, and passes no
            position_ids on.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    extra = [name for name in ("softcap", "indices") if kwargs.get(name) is not None]
    if extra:
        raise DataError(
            f"{type(module).__name__} gives attention {extra[0]}, which {VARLEN} and sdpa do not know: it would be left out. "
            "Use attn_implementation eager or flex_attention"
        )
    batch, heads, length, head_dim = query.shape
    documents = _documents_in(kwargs, batch, length)
    causal = kwargs.get("is_causal") is not False and getattr(module, "is_causal", True)
    window, sign = 0, _read_sign(attention_mask)
    if sign is not None:
        documents = documents or _a_document_a_row(module, batch, length, query.device, sign.packed)
        window, causal, attention_mask = sign.window, True, None
    separate = documents is not None and key.shape[2] == length and causal
    packed.asked_by["attention"] += separate or attention_mask is not None
    scale = scaling if scaling is not None else head_dim**-0.5
    sinks = kwargs.get("s_aux")
    knows_documents = query.is_cuda and query.dtype in DTYPES and value.shape[-1] <= head_dim <= 256 and not dropout
    if sinks is not None and not (separate and knows_documents and attention_mask is None):
        if attention_mask is None:
            attention_mask = visible(query, key, documents if separate else None, window, causal)
        return plain_with_sinks(query, key, value, sinks, attention_mask, scale, dropout if module.training else 0.0), None
    whole_rows = documents is not None and documents.one_a_row and not window
    if attention_mask is not None or documents is None or not separate or (whole_rows and not knows_documents):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if knows_documents:
        return attend(query, key, value, documents, scale, attention_path, window, sinks), None
    q, k, v = (x.transpose(1, 2).reshape(batch * length, x.shape[1], x.shape[-1]) for x in (query, key, value))
    out = per_document(q, k, v, documents.bounds, scale, dropout if module.training else 0.0, window)
    return out.reshape(batch, length, heads, value.shape[-1]), None


@dataclass(frozen=True)
class _Seen:
    """What a mask lets a query see: inside its document if `packed`, before it if `causal`, the last `window` tokens (0: all)."""

    window: int = 0
    packed: bool = False
    causal: bool = False


def _seen_by(mask_function: Callable[..., Any]) -> _Seen | None:
    """A transformers mask in the terms of `varlen_attention`; None if it is more than that.

    The masks are closures without a name of their own, so they are told by where they were made. One that is not known
    counts as something else, which costs a dense mask and never a wrong one.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is causal_mask_function:
        return _Seen(causal=True)
    maker = getattr(mask_function, "__qualname__", "").split(".")[0]
    inner = inspect.getclosurevars(mask_function).nonlocals
    if maker == "packed_sequence_mask_function":
        return _Seen(packed=True)
    if maker == "sliding_window_overlay":
        return _Seen(window=int(inner["sliding_window"]))
    if maker == "remap_positions_for_packed_sequence":
        found = _seen_by(inner["mask_function"])
        return found and replace(found, packed=True)
    if maker == "and_masks":
        parts = [_seen_by(one) for one in inner["mask_functions"]]
        known = [one for one in parts if one is not None]
        windows = [one.window for one in known if one.window]
        if len(known) == len(parts):
            return _Seen(min(windows, default=0), any(one.packed for one in known), any(one.causal for one in known))
    return None


def adds_to_masks(config: Any) -> bool:
    """Whether a family's code puts something of its own into the mask (Doge, DeepSeek V3.2's index) and so asks for all of it.

    With None in its place attention would be given nothing but the family's part. The mask function is told so by an argument, but
    packed rows set the same one, so the code is looked at.
    """
    home = type(config).__module__
    return "configuration_" in home and _asks_for_whole_masks(home.replace("configuration_", "modeling_"))


@functools.cache
def _asks_for_whole_masks(module: str) -> bool:
    return module in sys.modules and re.search(r"causal_skip\W+False", inspect.getsource(sys.modules[module])) is not None


def _window_sign(seen: _Seen) -> torch.Tensor:
    """Stands for a mask that is a sliding window, between the model that asks for it and the attention that is given it.

    No element, so that it costs nothing and any use of it as a mask fails; its shape says the window, and whether rows are packed.
    """
    return torch.empty((0, seen.window, 1 + seen.packed), dtype=torch.bool)


def _read_sign(mask: torch.Tensor | None) -> _Seen | None:
    """What a `_window_sign` stands for; None of anything else."""
    if mask is None or mask.ndim != 3 or mask.shape[0]:
        return None
    return _Seen(mask.shape[1], mask.shape[2] == 2, causal=True)


def _a_document_a_row(module: torch.nn.Module, batch: int, length: int, device: torch.device, packed_rows: bool) -> Documents:
    """For a model that passes no position_ids on to its attention."""
    if packed_rows:
        raise DataError(
            f"{type(module).__name__} has a sliding window and is given no position_ids, so documents in a row would see each other; "
            "use attn_implementation sdpa, or packing='none' or packing='concatenate'"
        )
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
    return Documents(bounds, length, one_a_row=True)


def has_varlen() -> bool:
    """Whether this torch brings variable-length flash attention (2.10 and later)."""
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None


def register_varlen() -> str:
    """Adds `bigtrain_varlen` to transformers; returns the name to pass as `attn_implementation`.

    Layers whose mask is more than causal, documents and a sliding window (blocks of image tokens) keep sdpa's dense mask, as do
    families that add to the mask themselves, and anything called with an attention mask.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        length = kwargs.get("kv_length", 0)
        is_plain = kwargs.get("attention_mask") is None and kwargs.get("q_length") == length
        is_plain = is_plain and not adds_to_masks(kwargs.get("config"))
        seen = _seen_by(kwargs.get("mask_function", causal_mask_function)) if is_plain else None
        if seen is None or (0 < seen.window < length and not seen.causal):
            return sdpa_mask(*args, **kwargs)
        return _window_sign(seen) if 0 < seen.window < length else None

    AttentionInterface.register(VARLEN, varlen_attention)
    AttentionMaskInterface.register(VARLEN, mask)
    _listen_to_masks()
    packed.wanted = True
    return VARLEN
