"""Named model shapes: `preset:NAME` is a Hugging Face config without a download and without weights.

Plain dictionaries with the keys of a `config.json`, so that `AutoConfig.for_model(**config_dict(name))`, the planner
and the model builder read the same thing. Sizes follow the public config files of the models that they are named after;
`llama-tiny` and `llama-50m` are this project's own, for demonstrations and tests, and so are `llama-8.36b`, `llama-20b` and `mixtral-4b`.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from pathlib import Path
from typing import Any

from bigtrain import standins
from bigtrain.errors import UsageError
from bigtrain.shapes_families import FURTHER

PREFIX = "preset:"


def _llama(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 128256,
    tied: bool = False,
    positions: int = 8192,
    theta: float = 500000.0,
    eos: int | list[int] = 128001,
    bos: int = 128000,
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }


def _qwen2(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, vocab: int = 152064, tied: bool = False
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def _mixtral(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, experts: int, active: int) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_local_experts": experts,
        "num_experts_per_tok": active,
        "vocab_size": 32000,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _mistral(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    config = _llama(hidden, ffn, layers, heads, kv_heads, vocab=vocab, positions=32768, theta=1e6, bos=1, eos=2)
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    return {**config, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}


def _gpt_neox(hidden: int, ffn: int, layers: int, heads: int, vocab: int, act: str) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "hidden_act": act,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


_GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}

_PHI_3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": 2047,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "torch_dtype": "bfloat16",
}

_OLMOE_1B_7B = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "vocab_size": 50304,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "torch_dtype": "bfloat16",
}

_LLAMA2: dict[str, Any] = {"vocab": 32000, "positions": 4096, "theta": 10000.0, "bos": 1, "eos": 2}

_QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "text_config": {
        **{k: v for k, v in _qwen2(3584, 18944, 28, 28, 4).items() if k != "architectures"},
        "model_type": "qwen2_5_vl_text",
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_channels": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "torch_dtype": "bfloat16",
}

_LLAVA_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "tie_word_embeddings": False,
    "text_config": _llama(4096, 11008, 32, 32, 32, vocab=32064, positions=4096, theta=10000.0, bos=1, eos=2),
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "torch_dtype": "bfloat16",
}

_SHAPES: dict[str, dict[str, Any]] = {
    # 2.5 M parameters, a vocabulary of 512: trains on two CPU cores in seconds.
    "llama-tiny": _llama(192, 512, 6, 6, 2, vocab=512, tied=True, positions=1024, theta=10000.0, bos=1, eos=2),
    "llama-50m": _llama(512, 1408, 8, 8, 4, vocab=32000, tied=False, positions=2048, theta=10000.0, bos=1, eos=2),
    "llama-135m": _llama(576, 1536, 30, 9, 3, vocab=49152, tied=True, positions=8192, theta=100000.0, bos=1, eos=2),
    "llama-360m": _llama(960, 2560, 32, 15, 5, vocab=49152, tied=True, positions=8192, theta=100000.0, bos=1, eos=2),
    "llama-1b": _llama(2048, 8192, 16, 32, 8, tied=True),
    "llama-3b": _llama(3072, 8192, 28, 24, 8, tied=True),
    "llama-7b": _llama(4096, 11008, 32, 32, 32, **_LLAMA2),
    "llama-8b": _llama(4096, 14336, 32, 32, 8),
    # The same with more positions: rotary angles are computed for whatever position comes, nothing is scaled, no weight is larger.
    "llama-8b-1m": _llama(4096, 14336, 32, 32, 8, positions=2**20),
    # 8.36 B parameters: the size of a public out-of-memory case on 47.4 GB cards, as a Llama.
    "llama-8.36b": _llama(4096, 14688, 32, 32, 8, vocab=152064),
    "llama-13b": _llama(5120, 13824, 40, 40, 40, **_LLAMA2),
    # 20.3 B parameters, not the shape of a published model: the largest that one 80 GB card is asked to train.
    "llama-20b": _llama(6144, 16384, 48, 48, 8, vocab=128256),
    "llama-34b": _llama(8192, 22016, 48, 64, 8, vocab=32000, positions=16384, theta=1e6, bos=1, eos=2),
    "llama-70b": _llama(8192, 28672, 80, 64, 8),
    "llama-405b": _llama(16384, 53248, 126, 128, 8, positions=131072),
    "pythia-1.4b": _gpt_neox(2048, 8192, 24, 16, 50304, "gelu"),
    "gpt-neox-20b": _gpt_neox(6144, 24576, 44, 64, 50432, "gelu_fast"),
    "mistral-7b": _mistral(4096, 14336, 32, 32, 8, 32768),
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, vocab=151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, vocab=151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, vocab=151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8),
    "gemma-3-1b": _GEMMA_3_1B,
    "phi-3-mini": _PHI_3_MINI,
    "olmoe-1b-7b": _OLMOE_1B_7B,
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, vocab=49152, tied=True, positions=8192, theta=130000.0, bos=1, eos=2),
    **FURTHER,
    "mixtral-tiny": _mixtral(128, 256, 4, 4, 2, 4, 2),
    "mixtral-4b": _mixtral(2048, 5632, 16, 32, 8, 8, 2),
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 8, 8, 2),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 8, 8, 2),
    "qwen2.5-vl-7b": _QWEN2_5_VL_7B,
    "llava-1.5-7b": _LLAVA_7B,
}


def names() -> tuple[str, ...]:
    """Names of all shapes, in the order in which they are listed to a user (families, then size)."""
    return tuple(_SHAPES)


def is_preset(name: object) -> bool:
    """True for `preset:NAME`, whether or not there is such a shape; False for a folder, a hub id, or what is no name."""
    return isinstance(name, str) and name.startswith(PREFIX)


def config_dict(name: str) -> dict[str, Any]:
    """Config of a named shape, as a fresh dictionary with the keys of a Hugging Face `config.json`.

    Args:
        name: one of `names()`, with or without the leading `preset:`; case does not matter.

    Raises:
        UsageError: there is no such shape; the message gives the nearest names.
    """
    key = name.strip().lower().removeprefix(PREFIX)
    if key in _SHAPES:
        return copy.deepcopy(_SHAPES[key])
    near = difflib.get_close_matches(key, _SHAPES, n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(_SHAPES)}"
    raise UsageError(f"there is no model shape called '{name}': {hint}. A directory with a config.json works as well.")


def read_config(source: str | Path) -> dict[str, Any]:
    """A model's config by `preset:NAME`, a folder with config.json, or that file.

    Raises:
        UsageError: there is no such shape or file, or it is no JSON object.
    """
    if is_preset(str(source)):
        return config_dict(str(source))
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if os.path.lexists(file):
            raise UsageError(f"{file} is {standins.instead(file)}")
        raise UsageError(f"{path}: no config.json there; give a model folder, a config.json or {PREFIX}NAME")
    config = read_json(file, "the model config")
    if not isinstance(config, dict):
        raise UsageError(f"the model config '{file}' is no JSON object, {{...}}, but {standins.kind(config)}")
    return config


def read_json(path: str | Path, what: str) -> Any:
    """A JSON file, or a UsageError that says which file is wrong and where."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {what} '{path}': {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number of thousands of digits; nested without end
        raise UsageError(f"{what} '{path}' is {standins.instead(path) or f'not JSON: {error}'}") from error
