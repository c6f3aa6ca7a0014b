"""Whatever is wrong with the files stops all ranks together, before a byte is read, with file, tensor, expected and actual."""

from __future__ import annotations

import json
import os

import pytest
import torch

from tests.ranks import families
from tests.ranks.test_weights_load import differences, partition
from tests.unit.weights.damage import SHARDS, Net, damage, pristine, write


def attempt(folder, stage=3, family=None, **kwargs):
    """`(error class, text, file, tensor, untouched)` of a load, or its report."""
    from bigtrain.weights import load_into

    model = Net() if family is None else families.make(family, seed=1)
    if stage == 3:
        partition(model)
    with torch.no_grad():
        for param in model.parameters():
            (param.ds_tensor if stage == 3 else param).fill_(7.0)
    try:
        return load_into(model, folder, progress=False, **kwargs)
    except Exception as error:
        held = [param.ds_tensor if stage == 3 else param for param in model.parameters()]
        untouched = all(bool((tensor == 7.0).all()) for tensor in held)
        return type(error).__name__, str(error), getattr(error, "file", None), getattr(error, "tensor", None), untouched


def attempt_many(folders, own=False):
    """`attempt` for each folder; with `own`, rank 1 gets a damaged copy and rank 0 the sound one."""
    import torch.distributed as dist

    return [attempt(pair[dist.get_rank()] if own else pair) for pair in folders]


def test_damaged_checkpoints_stop_both_ranks(rank_pool, tmp_path):
    cases = [damage(seed) for seed in range(5000, 5080)]
    folders = [write(files, tmp_path / str(i)) for i, (_, files) in enumerate(cases)]
    first, second = rank_pool(2).run(attempt_many, folders, limit_s=240)
    refused = 0
    for (what, _), a, b in zip(cases, first, second):
        if not isinstance(a, tuple):
            assert not isinstance(b, tuple), what
            continue
        assert a[0] == b[0] and a[0].endswith("WeightsError") and a[1] == b[1] and a[2] and a[4] and b[4], (what, a, b)
        refused += 1
    assert refused > 70


def test_damage_on_one_host_only_stops_the_other_ranks_too(rank_pool, tmp_path):
    sound = write(pristine(), tmp_path / "sound")
    cases = [damage(seed) for seed in range(7000, 7040)]
    pairs = [(sound, write(files, tmp_path / str(i))) for i, (_, files) in enumerate(cases)]
    first, second = rank_pool(2).run(attempt_many, pairs, own=True, limit_s=240)
    for (what, _), a, b in zip(cases, first, second):
        if isinstance(b, tuple) and b[0].endswith("WeightsError"):
            assert a[0] == "RanksDisagreeError" and "rank 1" in a[1] and a[4] and b[4], (what, a, b)
        else:  # the damage is harmless in itself, but the layouts may differ
            assert type(a) is type(b) and (not isinstance(a, tuple) or a[0] == b[0] == "RanksDisagreeError"), (what, a, b)


def test_B21_cut_or_missing_shard(rank_pool, tmp_path):
    shard = list(SHARDS)[1]
    files = pristine()
    cut = write({**files, shard: files[shard][:-100]}, tmp_path / "cut")
    gone = write({name: content for name, content in files.items() if name != shard}, tmp_path / "gone")
    index = json.loads(files["model.safetensors.index.json"])
    index["weight_map"]["c.weight"] = shard
    lists = write({**files, "model.safetensors.index.json": json.dumps(index).encode()}, tmp_path / "lists")
    for folder, words in [
        (cut, (shard, str(len(files[shard])), str(len(files[shard]) - 100))),
        (gone, (shard, "missing")),
        (lists, (shard, "c.weight")),
    ]:
        for name, text, file, _tensor, untouched in rank_pool(2).run(attempt, folder):
            assert name == "WeightsError" and untouched and all(word in text for word in words), text
            assert os.path.basename(file) in (shard, os.path.basename(folder))


def rewrite(source, target, change):
    """Copy a checkpoint, its tensors passed through `change(name, tensor) -> {name: tensor}`."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    for name in os.listdir(target):
        if name.endswith(".index.json"):
            os.unlink(f"{target}/{name}")
    tensors = {}
    for name in sorted(os.listdir(target)):
        if name.endswith(".safetensors"):
            for key, value in load_file(f"{target}/{name}").items():
                tensors |= change(key, value)
            os.unlink(f"{target}/{name}")
    save_file({k: v.clone() for k, v in tensors.items()}, f"{target}/model.safetensors", {"format": "pt"})
    return str(target)


def test_B19_missing_unexpected_and_mismatched_stop_unless_allowed(rank_pool, tmp_path):
    families.save("llama_untied", str(tmp_path / "sound"))
    sound = tmp_path / "sound"
    prefix = rewrite(sound, tmp_path / "prefix", lambda k, v: {k.replace("model.layers", "text.layers"): v})
    lacks = rewrite(sound, tmp_path / "lacks", lambda k, v: {} if "layers.1." in k else {k: v})
    extra = rewrite(sound, tmp_path / "extra", lambda k, v: {k: v, k + ".more": v} if "lm_head" in k else {k: v})
    other = rewrite(sound, tmp_path / "other", lambda k, v: {k: v[:-1]} if "lm_head" in k else {k: v})
    for folder, words in [
        (prefix, ("missing, 18", "unexpected, 18", "text.layers.0", "allow_missing=('model.layers.*',)")),
        (lacks, ("missing, 9", "model.layers.1.")),
        (extra, ("unexpected, 1", "lm_head.weight.more", "allow_unexpected=")),
        (other, ("lm_head.weight", "expected shape [131, 36]", "gives [130, 36]", "model.safetensors")),
    ]:
        for name, text, _file, _tensor, untouched in rank_pool(2).run(attempt, folder, family="llama_untied"):
            assert name == "WrongWeightsError" and untouched and all(word in text for word in words), text
    report = rank_pool(2).run(attempt, lacks, family="llama_untied", allow_missing=("model.layers.1.*",))[0]
    assert len(report.missing) == 9 and all(name.startswith("model.layers.1.") for name in report.missing)
    report = rank_pool(2).run(attempt, extra, family="llama_untied", allow_unexpected=("*.more",))[1]
    assert report.unexpected == ["lm_head.weight.more"] and not report.missing


def test_quantised_and_mixed_checkpoints_are_refused_by_name(rank_pool, tmp_path):
    families.save("llama", str(tmp_path / "sound"))
    quantised = rewrite(tmp_path / "sound", tmp_path / "quantised", lambda k, v: {k: v})
    with open(f"{quantised}/config.json") as file:
        config = json.load(file)
    with open(f"{quantised}/config.json", "w") as file:
        json.dump({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}, file)
    packed = rewrite(tmp_path / "sound", tmp_path / "packed", lambda k, v: {k: v.to(torch.int8) if "q_proj" in k else v})
    mixed = rewrite(tmp_path / "sound", tmp_path / "mixed", lambda k, v: {k: v.half() if k == "model.norm.weight" else v})
    for folder, words in [
        (quantised, ("quantised", "gptq")),
        (packed, ("q_proj.weight", "I8", "BF16", "quantised")),
        (mixed, ("model.norm.weight", "F16", "allow_mixed_half")),
    ]:
        for name, text, _file, _tensor, untouched in rank_pool(2).run(attempt, folder, family="llama"):
            assert name in ("WeightsError", "WrongWeightsError") and untouched and all(word in text for word in words), text
    assert rank_pool(2).run(attempt, mixed, family="llama", allow_mixed_half=True)[0].missing == []


def truncate_while_reading(folder):
    """The file shrinks on rank 1's disk after the check: only the reads notice."""
    import torch.distributed as dist

    from bigtrain.weights import load, load_into

    model = partition(Net())
    real = load._read_all

    def shrink(plan, found, *rest):
        for file in found.files:
            if dist.get_rank() == 1:
                os.truncate(file, os.path.getsize(file) - 40)
        dist.barrier()
        return real(plan, found, *rest)

    load._read_all = shrink
    try:
        load_into(model, folder, progress=False)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        load._read_all = real


def test_a_file_cut_during_the_read_stops_all_ranks(rank_pool, tmp_path):
    results = rank_pool(2).run(truncate_while_reading, write(pristine(), tmp_path))
    assert any(name == "WeightsError" and "ended at byte" in text for name, text in results), results
    assert all(name in ("WeightsError", "RanksDisagreeError") for name, _ in results)


def load_state_dict_directly(folder):
    from bigtrain.weights import load_into

    model = families.make("llama")
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    partition(model)
    load_into(model, folder, progress=False)
    try:
        model.load_state_dict(whole)
    except Exception as error:
        return type(error).__name__, str(error)


def test_B20_direct_load_state_dict_names_the_right_function(rank_pool, tmp_path):
    families.save("llama", str(tmp_path / "m"))
    for name, text in rank_pool(2).run(load_state_dict_directly, str(tmp_path / "m")):
        assert name == "ModelError" and "load_into" in text and "embed_tokens" in text


def verify_after_damage(folder):
    """Change one element of one rank's partition after reading: the hash must notice."""
    import torch.distributed as dist

    from bigtrain.weights import load_into, read

    model = partition(families.make("qwen3_moe", seed=5))
    real = read.Reader.run

    def run(self, ops):
        count = real(self, ops)
        if dist.get_rank() == 1 and ops and ops[0].dest.data_ptr() in held:
            ops[len(ops) // 2].dest[0] += 1
        return count

    held = {param.ds_tensor.data_ptr() + 0 for param in model.parameters()}
    read.Reader.run = run
    try:
        load_into(model, folder, progress=False, verify=True)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        read.Reader.run = real


def test_verify_finds_one_changed_element(rank_pool, tmp_path):
    families.save("qwen3_moe", str(tmp_path / "m"))
    results = rank_pool(2).run(verify_after_damage, str(tmp_path / "m"))
    assert {name for name, _ in results} <= {"WeightsError", "RanksDisagreeError"}, results
    assert any("in the model" in text and "in the file" in text for _, text in results)


class Evil:
    """Unpickling this would create a file."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/bigtrain-pickle-ran",)


def test_pickles_are_read_restricted(rank_pool, tmp_path):
    model = families.make("llama")
    for name, kwargs in [("zip", {}), ("legacy", {"_use_new_zipfile_serialization": False})]:
        folder = tmp_path / name
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin", **kwargs)
        assert rank_pool(2).run(attempt, str(folder), family="llama")[1].missing == []
    evil = tmp_path / "evil"
    model.config.save_pretrained(evil)
    torch.save({**model.state_dict(), "x": Evil()}, evil / "pytorch_model.bin")
    for name, text, *_ in rank_pool(2).run(attempt, str(evil), family="llama"):
        assert name == "WeightsError" and "pytorch_model.bin" in text
    assert not os.path.exists("/tmp/bigtrain-pickle-ran")
    cut = tmp_path / "cut"
    model.config.save_pretrained(cut)
    whole = (tmp_path / "zip" / "pytorch_model.bin").read_bytes()
    (cut / "pytorch_model.bin").write_bytes(whole[: len(whole) // 2])
    for name, text, *_ in rank_pool(2).run(attempt, str(cut), family="llama"):
        assert name == "WeightsError" and "pytorch_model.bin" in text


def ties(folders):
    same, differ = folders
    out = [attempt(same, family="llama"), attempt(differ, family="llama")]
    model = partition(families.make("llama", seed=3))
    from bigtrain.weights import load_into

    load_into(model, same, progress=False)
    return out, differences(model, families.make("llama"))


@pytest.mark.parametrize("world", [2])
def test_tied_weights_stored_twice_must_be_equal(rank_pool, tmp_path, world):
    families.save("llama", str(tmp_path / "m"))
    with_head = {"lm_head.weight": lambda v: v, "changed": lambda v: v + 1}
    same, differ = (
        rewrite(
            tmp_path / "m", tmp_path / name, lambda k, v, f=change: {k: v, "lm_head.weight": f(v)} if "embed" in k else {k: v}
        )
        for name, change in with_head.items()
    )
    for (good, bad), wrong in rank_pool(world).run(ties, (same, differ)):
        assert good.missing == [] and not wrong
        assert (
            bad[0] in ("WeightsError", "RanksDisagreeError") and "lm_head.weight" in bad[1] and "tie_word_embeddings" in bad[1]
        )
