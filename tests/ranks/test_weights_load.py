"""What `load_into` puts into a model equals, bit for bit, what plain `from_pretrained` would have put there."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch

from tests.ranks import cross, families

STAGE3 = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """family -> folder, written once; every second family in several shards."""
    made = {}

    def folder(family, **kwargs):
        key = (family, json.dumps(kwargs, sort_keys=True))
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp(family))
            kwargs.setdefault("max_shard_size", "20KB" if len(made) % 2 else "5GB")
            families.save(family, made[key], **kwargs)
        return made[key]

    return folder


def partition(model, config=None):
    """Hand a plain module to ZeRO-3."""
    import deepspeed

    deepspeed.zero.Init(module=model, config_dict_or_path=config or STAGE3, dtype=next(model.parameters()).dtype)
    return model


def gathered_state(model):
    """Every tensor of the state dict, whole."""
    from bigtrain import zero

    out = {}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.nn.Parameter):
                with zero.gathered([tensor]):
                    out[name] = tensor.detach().clone()
            else:
                out[name] = tensor.detach().clone()
    return out


def differences(model, reference):
    """Names whose values are not bitwise equal to `reference`'s."""
    mine = gathered_state(model)
    theirs = reference.state_dict()
    bad = sorted(set(mine) ^ set(theirs))
    for name, value in theirs.items():
        same = name in mine and mine[name].dtype == value.dtype and mine[name].shape == value.shape
        if not same or not torch.equal(mine[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)):
            bad.append(name)
    return bad


def load_and_compare(todo, stages, dtype=torch.bfloat16, **kwargs):
    """For every (family, folder) and stage: build with other values, load, compare with from_pretrained on this rank."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from bigtrain.weights import load_into

    bad = {}
    for family, folder in todo:
        try:
            reference = cross.reference_of(folder, dtype)
            for stage in stages:
                model = type(reference)._from_config(reference.config, dtype=dtype)
                for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
                    mine.data = mine.data.to(theirs.dtype)  # before transformers 5.2x, _from_config has all of them in `dtype`
                if stage == 3:
                    partition(model)
                report = load_into(model, folder, progress=False, **kwargs)
                wrong = differences(model, reference)
                if wrong or report.missing or report.unexpected:
                    bad[family, stage] = (wrong, report)
        except Exception as error:
            import traceback

            bad[family] = "".join(traceback.format_exception(error)[-6:])
    return bad


@pytest.mark.parametrize("world,stages", [(1, (0, 3)), (2, (0, 3)), (3, (3,)), (4, (3,))])
def test_families_equal_from_pretrained(rank_pool, checkpoints, world, stages):
    """Without ZeRO-3 a CPU rank reads everything, whatever the number of ranks. `tests.ranks.cross` is the full cross."""
    todo = [(family, checkpoints(family)) for family in families.FAMILIES]
    for bad in rank_pool(world).run(load_and_compare, todo, stages, verify=world == 2, limit_s=400):
        assert not bad, "\n".join(f"{family}: {why}" for family, why in bad.items())


@pytest.mark.parametrize("world", [3])
def test_engines_at_every_stage_equal_from_pretrained(rank_pool, checkpoints, world):
    todo = [(family, checkpoints(family)) for family in ("llama_odd", "resnet", "ernie_vl_moe", "clip")]
    for rows in rank_pool(world).run(cross.check, todo, limit_s=240):
        wrong = {family: row["wrong"] for family, row in rows.items()}
        assert wrong == {family: {stage: [] for stage in cross.STAGES} for family, _ in todo}
        assert all(rows[family]["padding"] > 0 for family in ("llama_odd", "resnet", "clip"))


@pytest.mark.parametrize("world", [2, 3])
def test_element_types_convert_on_the_way(rank_pool, tmp_path, world):
    cases = []
    for stored in (torch.float32, torch.float16, torch.bfloat16):
        folder = str(tmp_path / str(stored))
        families.make("qwen3", dtype=torch.float32).to(stored).save_pretrained(folder)
        cases.append(("qwen3", folder))
    for wanted in (torch.float32, torch.bfloat16, torch.float16):
        for bad in rank_pool(world).run(load_and_compare, cases, (0, 3), wanted, verify=True):
            assert not bad, (wanted, bad)


def shared_read(todo):
    """Whole parameters read in shares and exchanged: forced here on the CPU, used on several GPUs."""
    from bigtrain.weights import share

    real = share.assign
    share.SEGMENT_BYTES, before = 1000, share.SEGMENT_BYTES
    share.assign = lambda slots: real(slots, always=True)
    try:
        return load_and_compare(todo, (0,), verify=True)
    finally:
        share.assign, share.SEGMENT_BYTES = real, before


@pytest.mark.parametrize("world", [2, 3])
def test_whole_parameters_are_read_once_and_exchanged(rank_pool, checkpoints, world):
    todo = [(family, checkpoints(family)) for family in ("llama", "qwen3_moe", "ernie_vl_moe", "resnet")]
    for bad in rank_pool(world).run(shared_read, todo):
        assert not bad, bad


def heads(base, whole):
    """A base model's file into a model with a head, a model's file into its base, and old names of layer norms."""
    import transformers as t

    from bigtrain.weights import load_into

    out = []
    for cls, folder, allowed in [
        (t.LlamaForCausalLM, base, ()),
        (t.LlamaModel, whole, ()),
        (t.LlamaForSequenceClassification, whole, ("score.weight",)),
    ]:
        reference = cls.from_pretrained(folder, dtype=torch.bfloat16)
        model = partition(cls._from_config(reference.config, dtype=torch.bfloat16))
        report = load_into(model, folder, progress=False, allow_missing=allowed, verify=True)
        out.append([name for name in differences(model, reference) if name not in report.missing])
    return out


def test_prefixes_are_added_and_removed_as_in_transformers(rank_pool, tmp_path):
    families.make("llama").model.save_pretrained(tmp_path / "base")
    families.make("llama").save_pretrained(tmp_path / "whole")
    for wrong in rank_pool(2).run(heads, str(tmp_path / "base"), str(tmp_path / "whole")):
        assert wrong == [[], [], []]


def test_legacy_names_of_layer_norms(rank_pool, tmp_path):
    from tests.ranks.test_weights_errors import rewrite

    families.save("bert", str(tmp_path / "new"))
    old = rewrite(
        tmp_path / "new",
        tmp_path / "old",
        lambda k, v: {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v},
    )
    for bad in rank_pool(2).run(load_and_compare, [("bert", old)], (3,), verify=True):
        assert not bad, bad


def after_initialize_each(folder, cases):
    """`after_initialize` of every case, in one job."""
    return [after_initialize(folder, *case) for case in cases]


def after_initialize(folder, stage, offload, fill_late):
    """The engine's parameters equal from_pretrained's, loaded before the engine is made (or, at stage 3, after)."""
    from bigtrain import zero
    from bigtrain.weights import load_into

    model = families.make("llama", seed=99)
    reference = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10_000 if fill_late else 100},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if offload:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        partition(model, config)
    if not fill_late:
        load_into(model, folder, progress=False)
    engine = zero.initialize(model, config, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
    if fill_late:
        load_into(model, folder, progress=False)
    return differences(engine.module, reference)


@pytest.mark.parametrize("world", [2, 3])
def test_values_survive_the_engine(rank_pool, checkpoints, world):
    cases = [(1, 0, 0), (2, 0, 0), (3, 0, 0), (3, 1, 0), (3, 0, 1)]
    for wrong in rank_pool(world).run(after_initialize_each, checkpoints("llama"), cases):
        assert wrong == [[]] * len(cases), dict(zip(cases, wrong))


def bytes_so_far():
    """Bytes that this thread has asked the kernel to read: gloo's own threads, which read from sockets, are not in it."""
    descriptor = os.open("/proc/thread-self/io", os.O_RDONLY)
    try:
        return int(os.read(descriptor, 4096).split()[1])
    finally:
        os.close(descriptor)


def measured(call):
    """`(bytes that this thread read during call(), its result)`."""
    before = bytes_so_far()
    result = call()
    return bytes_so_far() - before, result


def count_traffic(folder):
    """Bytes and collectives of one stage 3 load on this rank, what it should have read, and what measuring adds."""
    import torch.distributed as dist

    from bigtrain.weights import load_into, read

    model = partition(families.make("llama", seed=9))
    own = sum(min(p.ds_numel - p.ds_tensor.numel() * dist.get_rank(), p.ds_tensor.numel()) for p in model.parameters()) * 2
    inside, calls, real = [], [], read.Reader.run
    names = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "barrier", "all_to_all", "scatter", "send")
    originals = {name: getattr(dist, name) for name in names}

    def run(self, ops):
        for name in names:
            setattr(dist, name, lambda *a, _n=name, **k: calls.append(_n) or originals[_n](*a, **k))
        try:
            nbytes, count = measured(lambda: real(self, ops))
            inside.append(nbytes - overhead)
            return count
        finally:
            for name in names:
                setattr(dist, name, originals[name])

    # A read asks once how much memory the host has: /proc/meminfo, 1.5 KB of text that differ from kernel to kernel.
    overhead, _ = measured(read.available_bytes)
    read.Reader.run = run
    try:
        report = load_into(model, folder, progress=False, threads=1)  # in this thread, whose reads are counted
    finally:
        read.Reader.run = real
    return own, report.bytes_read, inside, calls


def test_B23_each_rank_reads_its_share_once_without_collectives(rank_pool, tmp_path):
    families.save("llama", str(tmp_path / "m"), max_shard_size="12KB")
    results = rank_pool(2).run(count_traffic, str(tmp_path / "m"))
    total = sum(p.numel() * 2 for p in families.make("llama").parameters())
    for own, reported, read, calls in results:
        assert own == reported == sum(read) and len(read) == 1 and not calls
    assert sum(own for own, *_ in results) == total


def host_memory(folder, numel):
    """Growth of this rank's private memory by a load, beside the model's own partitions."""
    from bigtrain.weights import load_into

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.empty(numel, dtype=torch.bfloat16))
            self.b = torch.nn.Parameter(torch.empty(numel // 2, 2, dtype=torch.bfloat16))

    def private():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

    import resource

    model = partition(Wide())
    share = sum(p.ds_tensor.numel() * 2 for p in model.parameters())
    before, peak = private(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load_into(model, folder, progress=False)
    grown = max(private() - before, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024)
    return grown, share, sum(hasattr(p, "ds_id") for p in model.parameters()), float(model.b.ds_tensor[-1])


def test_B18_no_rank_holds_more_than_its_share(rank_pool, tmp_path):
    from safetensors.torch import save_file

    numel = 40_000_000
    save_file({"a": torch.ones(numel, dtype=torch.bfloat16), "b": torch.full((numel // 2, 2), 3.0, dtype=torch.bfloat16)},
              tmp_path / "model.safetensors", {"format": "pt"})  # fmt: skip
    for grown, share, partitioned, last in rank_pool(2).run(host_memory, str(tmp_path), numel):
        # a partition may not have been touched before: its own pages may be counted, the other rank's half may not
        assert grown < share * 1.15 and share == numel * 2 and partitioned == 2 and last == 3.0


def masters(folder, stage, offload):
    """The engine's fp32 masters after `load_masters`, against the file's own fp32 values and against rounded ones."""
    from deepspeed.utils import safe_get_full_fp32_param

    from bigtrain import zero
    from bigtrain.weights import load_into, load_masters
    from bigtrain.zero import flat

    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "sub_group_size": 9000, "stage3_param_persistence_threshold": 100},
    }  # fmt: skip
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = families.make("qwen3_moe", seed=99)
    exact = type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
    if stage == 3:
        partition(model, config)
    load_into(model, folder, progress=False)
    groups = [{"params": list(model.parameters())[::2]}, {"params": list(model.parameters())[1::2]}]
    engine = zero.initialize(model, config, optimizer=torch.optim.AdamW(groups, lr=1e-3))

    def wrong():
        full = {name: safe_get_full_fp32_param(p).reshape(-1) for name, p in engine.module.named_parameters()}
        return [name for name, value in full.items() if not torch.equal(value, exact[name].reshape(-1))]

    before = len(wrong())
    return before, load_masters(engine.module, folder, master_of=flat.master_of(engine.optimizer)), wrong()


def masters_each(folder, cases):
    """`masters` of every case, in one job."""
    return [masters(folder, *case) for case in cases]


@pytest.mark.parametrize("world", [2, 3])
def test_masters_come_from_fp32_files_unrounded(rank_pool, tmp_path, world):
    families.make("qwen3_moe", dtype=torch.float32).save_pretrained(tmp_path)
    cases = [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
    for found in rank_pool(world).run(masters_each, str(tmp_path), cases, limit_s=240):
        for case, (before, filled, wrong) in zip(cases, found, strict=True):
            assert before > 10 and filled > 0 and not wrong, case


SMOLLM2 = os.environ.get("BIGTRAIN_TEST_SMOLLM2", "")


@pytest.mark.skipif(not SMOLLM2, reason="BIGTRAIN_TEST_SMOLLM2 names no folder with SmolLM2-135M")
@pytest.mark.parametrize("world", [2, 3])
def test_smollm2_equals_from_pretrained(rank_pool, world):
    """A real checkpoint of 135M parameters with tied embeddings."""
    for bad in rank_pool(world).run(load_and_compare, [("smollm2", SMOLLM2)], (0, 3), verify=True, limit_s=240):
        assert not bad
