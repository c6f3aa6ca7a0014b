"""What `export_model` writes loads with plain `from_pretrained`, and is what `save_pretrained` would have written."""

from __future__ import annotations

import json
import os

import pytest
import torch

from tests.ranks import families
from tests.ranks.test_weights_load import partition


def keys_in(folder):
    """name -> (dtype, shape) of every tensor in a folder."""
    from bigtrain.weights.folder import open_folder

    return {name: (info.dtype, info.shape) for name, info in open_folder(folder).tensors.items()}


def round_trip(todo, root, stage, **kwargs):
    """Build, partition, export; rank 0 compares with save_pretrained: same keys, shapes and bytes."""
    import torch.distributed as dist

    from bigtrain.weights import export_model, load_into

    bad = {}
    for family in todo:
        model = families.make(family)
        theirs, mine = f"{root}/{family}.saved", f"{root}/{family}.exported"
        if dist.get_rank() == 0:
            model.save_pretrained(theirs)
        dist.barrier()
        try:
            model = type(model).from_pretrained(theirs, dtype=torch.bfloat16) if "loaded" in kwargs else model
            if stage == 3:
                partition(model)
            report = export_model(model, mine, dtype="bfloat16", **{k: v for k, v in kwargs.items() if k != "loaded"})
            why = different(theirs, mine, report, type(model)) if dist.get_rank() == 0 else ""
            if why:
                bad[family] = why
        except Exception as error:
            import traceback

            bad[family] = "".join(traceback.format_exception(error)[-6:])
        dist.barrier()
    del load_into
    return bad


def different(theirs, mine, report, cls):
    """Why the exported folder is not as good as transformers' own; '' if it is."""
    if keys_in(theirs) != keys_in(mine):
        return f"keys: {sorted(set(keys_in(theirs).items()) ^ set(keys_in(mine).items()))[:6]}"
    a, b = (cls.from_pretrained(folder, dtype=torch.bfloat16).state_dict() for folder in (theirs, mine))
    wrong = [k for k in a if not torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8))]
    sizes = sum(os.path.getsize(f"{mine}/{name}") for name in report.files)
    if wrong or sizes != report.bytes:
        return f"values: {wrong}, sizes {sizes} {report.bytes}"
    with open(f"{mine}/config.json") as one, open(f"{theirs}/config.json") as two:
        one, two = json.load(one), json.load(two)
    return "" if one == two else f"config: {[(k, one.get(k), two.get(k)) for k in {*one, *two} if one.get(k) != two.get(k)]}"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranges", [True, False])
def test_families_equal_save_pretrained(rank_pool, tmp_path, world, stage, ranges):
    for bad in rank_pool(world).run(
        round_trip, list(families.FAMILIES), str(tmp_path), stage, ranges=ranges, max_shard_bytes=30_000, limit_s=400
    ):
        assert not bad, "\n".join(f"{family}: {why}" for family, why in bad.items())
