"""Tiny models of many kinds, and modules whose constructors do awkward things."""

from __future__ import annotations

import copy
from collections import OrderedDict

import numpy
import torch
from torch import nn

_TEXT = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
_VISION = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8, "patch_size": 4,
}  # fmt: skip
_LLAMA = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 3}

CONFIGS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_LLAMA},
    "llama_tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **_LLAMA, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "gpt2": {"model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 32},
    "opt": {
        "model_type": "opt", "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
        "max_position_embeddings": 32, "word_embed_proj_dim": 16,
    },
    "t5": {"model_type": "t5", "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": 61},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **_TEXT, "max_position_embeddings": 32},
    "vit": {"model_type": "vit", "architectures": ["ViTForImageClassification"], **_VISION},
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_LLAMA, "head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    },
    "llava": {
        "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "image_token_index": 60,
        "text_config": {"model_type": "llama", **_LLAMA},
        "vision_config": {"model_type": "clip_vision_model", **_VISION, "projection_dim": 24},
    },
}  # fmt: skip


class ConvNet(nn.Module):
    """A convolutional encoder with BatchNorm; odd sizes, so that partitions are padded."""

    def __init__(self, width: int = 5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.block = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 7)
        self.register_buffer("scale", torch.arange(width, dtype=torch.float32) / 3, persistent=False)

    def forward(self, x):
        h = self.stem(x)
        h = h + torch.relu(self.norm(self.block(h)))
        return self.head(h.mean((2, 3)) * self.scale.to(h.dtype))


class Awkward(nn.Module):
    """Inits that need whole values, shapes and rows of parameters made long before."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(13, 11)
        self.emb = nn.Embedding(17, 13, padding_idx=2)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 20, batch_first=True), 3)
        self.rnn = nn.LSTM(5, 7, bidirectional=True)
        self.list = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(3)])
        self.bank = nn.ModuleDict({"x": nn.Linear(3, 3, bias=False)})
        self.copied = copy.deepcopy(self.a)
        self.lazy_class = type("Made", (nn.Linear,), {})(4, 5)
        self.count = nn.Parameter(torch.arange(7), requires_grad=False)
        self.tied = nn.Linear(13, 17, bias=False)
        self.tied.weight = self.emb.weight
        nn.init.xavier_uniform_(self.a.weight)
        nn.init.orthogonal_(self.copied.weight)
        nn.init.trunc_normal_(self.emb.weight, std=0.3)
        with torch.no_grad():
            self.emb.weight[2].fill_(0)
            self.a.weight *= 1.5
            self.a.bias += self.a.weight.mean()
            self.list[1].copy_(self.list[0] @ self.list[2])
            self.bank["x"].weight.data = self.list[1].t().clone()
        self.lazy_class.weight.data.copy_(torch.from_numpy(numpy.random.randn(5, 4)).float())
        self.apply(self._more)
        torch.nn.utils.parametrizations.weight_norm(self.lazy_class)
        fused = torch.cat([p.detach().view(-1) for p in self.rnn.parameters()])
        self.register_buffer("from_parameters", fused.sum().view(1))

    def _more(self, module):
        if isinstance(module, nn.LSTM):
            for name, p in module.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(p)
        if isinstance(module, nn.LayerNorm):
            module.weight.data.uniform_(0.5, 1.5)


class Sevens(nn.Module):
    """The report's module: the constructor loops over modules and fills 7.0."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(OrderedDict(one=nn.Linear(9, 5), two=nn.Linear(5, 3)))
        for m in self.modules():
            if isinstance(m, nn.Linear):
                m.weight.data.fill_(7.0)
                nn.init.constant_(m.bias, 7.0)


CALLABLES = {"convnet": ConvNet, "awkward": Awkward, "sevens": Sevens}
ALL = [*CONFIGS, *CALLABLES]


def source(name):
    return CALLABLES.get(name) or copy.deepcopy(CONFIGS[name])


def plain(name, seed, dtype=torch.bfloat16, **overrides):
    """The reference: the same class built without ZeRO from the same seed, parameters rounded once."""
    import random

    from transformers import AutoConfig

    from bigtrain.models.source import _class_for

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    if name in CALLABLES:
        model = CALLABLES[name](**overrides)
    else:
        config = AutoConfig.for_model(**{**copy.deepcopy(CONFIGS[name]), **overrides})
        model = _class_for(config, False)._from_config(config, dtype=torch.float32)
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(dtype)
    return model


def differences(model, reference):
    """Names whose bits differ from the reference, gathered one by one; also buffers and the parameter list itself."""
    from bigtrain import zero

    wrong = []
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    if list(ours) != list(theirs):
        return [f"names: {set(ours) ^ set(theirs)}"]
    for name, p in ours.items():
        with zero.gathered([p]):
            t = theirs[name]
            same = p.shape == t.shape and p.dtype == t.dtype and p.requires_grad == t.requires_grad
            if not same or not torch.equal(p.data.contiguous().view(torch.uint8), t.data.contiguous().view(torch.uint8)):
                wrong.append(name)
    ours, theirs = dict(model.named_buffers()), dict(reference.named_buffers())
    wrong += [f"buffer {n}" for n in ours.keys() ^ theirs.keys()]
    wrong += [
        f"buffer {n}"
        for n in ours
        if n in theirs and not (ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]))
    ]
    return wrong
