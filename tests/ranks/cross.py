"""Every family at every ZeRO stage on 1 to 4 ranks: what the engine trains equals what plain `from_pretrained` gives.

    python -m tests.ranks.cross --results out/cross --worlds 1 2 3 4 --out docs/results/families.md

The full cross takes minutes, so the suite runs `check` on a part of it. Each world's results are kept in `--results`, so that
the worlds can run one by one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from bigtrain.diagnostics.pages import put_table
from tests.ranks import families

STAGES = (0, 1, 2, 3)


def settings(stage: int) -> dict[str, Any]:
    """A ds_config with partitioned and persistent parameters at stage 3."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
    }


def reference_of(folder: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """What plain `from_pretrained` makes of a folder, by the class that its config names."""
    import transformers

    with open(f"{folder}/config.json") as file:
        name = json.load(file)["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, also those that are not saved, whole."""
    from bigtrain import zero

    out = {}
    with torch.no_grad():
        for name, param in model.named_parameters(remove_duplicate=False):
            with zero.gathered([param]):
                out[name] = param.detach().clone()
    return out | {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}


def unequal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal, in the wider type where they have two (see `retyped`)."""
    bad = sorted(set(mine) ^ set(theirs))
    for name in set(mine) & set(theirs):
        a, b = mine[name], theirs[name]
        wide = torch.promote_types(a.dtype, b.dtype)
        if a.shape != b.shape or not torch.equal(*(t.to(wide).reshape(-1).view(torch.uint8) for t in (a, b))):
            bad.append(name)
    return bad


def retyped(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> int:
    """Tensors of another type than `from_pretrained`'s: a model has one dtype of parameters under ZeRO, where some classes
    ask for a few in fp32, and statistics of BatchNorm stay fp32, where `from_pretrained` rounds them."""
    return sum(name in theirs and theirs[name].dtype != value.dtype for name, value in mine.items())


def padding_of(model: torch.nn.Module) -> int:
    """Elements that all ranks' partitions have beyond the parameters' own."""
    from bigtrain import zero

    return sum(
        zero.partition_of(param)[1] * zero.partition_of(param)[2].numel() - zero.full_numel(param)
        for param in model.parameters()
        if zero.is_partitioned(param)
    )


def check(todo: list[tuple[str, str]], stages: tuple[int, ...] = STAGES) -> dict[str, dict[str, Any]]:
    """On every rank: `build_model` from each folder, then the engine; what differs from `from_pretrained`, by stage."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from bigtrain.engine import Engine
    from bigtrain.models import build_model

    found: dict[str, dict[str, Any]] = {}
    for family, folder in todo:
        reference = reference_of(folder)
        theirs = tensors_of(reference)
        row: dict[str, Any] = {
            "class": type(reference).__name__,
            "parameters": sum(p.numel() for p in reference.parameters()),
            "tensors": len(theirs),
            "padding": 0,
            "retyped": 0,
            "wrong": {},
        }
        for stage in stages:
            model = build_model(folder, ds_config=settings(stage))
            row["padding"] = max(row["padding"], padding_of(model))
            mine = tensors_of(model)
            row["retyped"] = max(row["retyped"], retyped(mine, theirs))
            engine = Engine(model, ds_config=settings(stage), optimizer="adamw")
            row["wrong"][stage] = unequal(mine, theirs) + unequal(tensors_of(engine.module), theirs)
            engine.close()
        found[family] = row
    return found


def _run(world: int, scratch: Path, known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of `known` and of the families that it lacks."""
    from tests.ranks.pool import RankPool

    todo = []
    for number, family in enumerate([*families.FAMILIES, *families.WITH_SCALARS]):
        folder = scratch / family
        if not folder.exists():
            families.save(family, str(folder), max_shard_size="20KB" if number % 2 else "5GB")
        todo.append((family, str(folder)))
    real = os.environ.get("BIGTRAIN_TEST_SMOLLM2")
    todo += [("SmolLM2-135M", real)] if real else []
    todo = [(family, folder) for family, folder in todo if family not in known]
    if not todo:
        return known
    pool = RankPool(world)
    try:
        answers = pool.run(check, todo, limit_s=1500)
    finally:
        pool.stop()
    rows = answers[0]
    for family, row in rows.items():
        row["wrong"] = {
            stage: sorted({name for other in answers for name in other[family]["wrong"][stage]}) for stage in row["wrong"]
        }
    return known | rows


def _table(results: dict[int, dict[str, dict[str, Any]]]) -> str:
    worlds = sorted(results)
    lines = [
        "What a family's tensors are after `build_model` and again in the engine that trains them, against plain `from_pretrained`",
        "(`python -m tests.ranks.cross`): every parameter, gathered, and every buffer, also those that are not saved, bit for bit.",
        f"Tiny models of odd sizes, stages 0 to 3 on {', '.join(map(str, worlds))} gloo ranks, one file or shards of 20 KB.",
        "Other type: compared in the wider one. Under ZeRO all parameters have one dtype, where some classes ask for a few in fp32;",
        "statistics of BatchNorm stay fp32, where `from_pretrained` rounds them.\n",
        "| family | class | parameters | tensors | of other type | ranks: elements of padding at stage 3 | equal, stages x ranks | "
        "different |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in sorted({family for rows in results.values() for family in rows}, key=str.lower):
        rows = {world: results[world][family] for world in worlds if family in results[world]}
        first = next(iter(rows.values()))
        wrong = [f"stage {s}, {w} ranks: {names[0]}" for w, row in rows.items() for s, names in row["wrong"].items() if names]
        checked = sum(len(row["wrong"]) for row in rows.values())
        padding = ", ".join(f"{world}: {row['padding']}" for world, row in rows.items())
        lines.append(
            f"| {family} | {first['class']} | {first['parameters']:,} | {first['tensors']} | {first['retyped']} | "
            f"{padding} | "
            f"{checked - len(wrong)} of {checked} | {'; '.join(wrong)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run what is not in `--results` yet, then write the table of all that is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("out/cross"))
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 3, 4])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for world in arguments.worlds:
            file = arguments.results / f"{world}.json"
            known = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps(_run(world, Path(scratch), known)))
    kept = sorted(arguments.results.glob("*.json"), key=lambda file: int(file.stem))
    table = _table({int(file.stem): json.loads(file.read_text()) for file in kept})
    (put_table(arguments.out, table) if arguments.out else print(table))


if __name__ == "__main__":
    main()
