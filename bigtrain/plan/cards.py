"""What is known of a card by its name."""

from __future__ import annotations

from functools import cache

from bigtrain.plan.machine import nvidia_smi

H100_FLOPS = 989e12
# Dense bf16 peak in FLOP/s, from the vendors' data sheets (without sparsity). Matched against the card's name, first hit wins.
PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("GH200", 989e12),
    ("H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", H100_FLOPS),
    ("H800", 989e12),
    ("H20", 148e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("RTX 6000 Ada", 364e12),
    ("RTX A6000", 154.8e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
)


def peak_bf16_flops(card: str | None) -> float | None:
    """Dense bf16 peak of a card in FLOP/s by its name, None if the card is not in the table."""
    if not card:
        return None
    words = card.replace("-", " ")
    # Whole words only: "A10" must not match "A100", "L4" not "L40".
    for name, flops in PEAK_BF16_FLOPS:
        if f" {name} " in f" {words} ":
            return flops
    return None


@cache
def card_name() -> str | None:
    """Of this machine's first card, as nvidia-smi says it; None without either, or where it fails or hangs."""
    text, _ = nvidia_smi("--query-gpu=name", "--format=csv,noheader")
    return next(iter((text or "").splitlines()), "").strip() or None
