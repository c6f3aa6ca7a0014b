"""A Hugging Face folder of random bf16 weights, written as fast as the disk takes it: what loading is measured on."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

BLOCK_BYTES = 64 << 20  # of random values, repeated; a tensor begins at a place of its own in it
WRITERS = 8
_block = memoryview(b"")  # of a writing process


def write(config: Any, folder: Path, shards: int) -> int:
    """The causal language model of a transformers config in `shards` files, by several processes; the bytes of all tensors."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = [(n, tuple(t.shape)) for n, t in transformers.AutoModelForCausalLM.from_config(config).state_dict().items()]
    if config.tie_word_embeddings:
        names = [(n, shape) for n, shape in names if n != "lm_head.weight"]
    total, parts, size = sum(2 * math.prod(s) for _, s in names), [[] for _ in range(shards)], 0  # type: ignore[var-annotated]
    for name, shape in names:
        parts[min(shards - 1, size * shards // total)].append((name, shape))
        size += 2 * math.prod(shape)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: file for file, part in zip(files, parts) for name, _ in part}
    block = (torch.randn(BLOCK_BYTES // 2) * 0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    with multiprocessing.get_context("fork").Pool(min(WRITERS, shards), _keep_block, (block,)) as pool:
        pool.starmap(_write_shard, [(str(folder / file), part) for file, part in zip(files, parts)], chunksize=1)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def _keep_block(block: bytes) -> None:
    global _block
    _block = memoryview(block)


def _write_shard(path: str, part: list[tuple[str, tuple[int, ...]]]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, shape in part:
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at := at + 2 * math.prod(shape)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, entry in enumerate(header.values()):
            begin, end = entry["data_offsets"]
            shift = number * 7919 * 4096 % BLOCK_BYTES
            while begin < end:
                begin += file.write(_block[shift : shift + min(end - begin, BLOCK_BYTES - shift)])
                shift = 0
