"""Small real models and fixed data for tests on ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 64


class TinyLM(nn.Module):
    """A decoder of two blocks with the Hugging Face calling convention: shifted labels, mean loss over targets."""

    def __init__(self, width: int = 32, blocks: int = 2, dropout: float = 0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, width), persistent=False)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids) * self.scale.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        if labels is None:
            return {"logits": logits}
        return {
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100),
            "logits": logits,
        }


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (t.view(b, s, 2, w // 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, s, w)))
        return x + self.down(F.gelu(self.up(x)))


class Branched(nn.Module):
    """A branch that runs only where the flag is set."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1)

    def forward(self, x, use_b=True):
        h = self.a(x)
        if use_b:
            h = h + self.b(h)
        return self.c(h).float().pow(2).mean()


def rows(step: int, n: int = 12, length: int = 12, ragged: bool = True) -> list[dict[str, torch.Tensor]]:
    """`n` samples of step `step`, the same on every rank, with ragged targets."""
    g = torch.Generator().manual_seed(1000 + step)
    out = []
    for i in range(n):
        ids = torch.randint(0, VOCAB, (1, length), generator=g)
        labels = ids.clone()
        if ragged:
            labels[:, 2 + (5 * i + step) % (length - 2) :] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def share(samples: list[dict[str, torch.Tensor]], rank: int, world: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """This rank's micro batches of a global batch."""
    micro = len(samples) // (world * accumulation)
    assert micro * world * accumulation == len(samples)
    mine = samples[rank * micro * accumulation : (rank + 1) * micro * accumulation]
    groups = [mine[i * micro : (i + 1) * micro] for i in range(accumulation)]
    return [{k: torch.cat([s[k] for s in group]) for k in group[0]} for group in groups]


def config(stage: int, *, bf16: bool = True, micro: int = 1, accumulation: int = 1, **zero) -> dict:
    """A ds_config for the CPU."""
    section = {"stage": stage, "reduce_bucket_size": 4000, "allgather_bucket_size": 4000, **zero}
    if stage == 3:
        section = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1000, **section}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": bf16},
        "zero_optimization": section,
    }


def whole_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter, gathered, fp32."""
    from bigtrain import zero

    out = {}
    for name, param in module.named_parameters():
        with zero.gathered([param]):
            out[name] = param.detach().float().clone()
    return out
