"""What `export_model` writes loads with plain `from_pretrained`, and is what `save_pretrained` would have written."""

from __future__ import annotations

import json
import os

import pytest
import torch

from bigtrain.errors import UsageError
from tests.ranks import families
from tests.ranks.test_weights_load import partition


def keys_in(folder):
    """name -> (dtype, shape) of every tensor in a folder."""
    from bigtrain.weights.folder import open_folder

    return {name: (info.dtype, info.shape) for name, info in open_folder(folder).tensors.items()}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`(family, folder)`: what plain transformers makes of each family, loaded in bf16 and saved again, written once.

    Loaded, because some classes want some of their tensors in fp32 then (DeepSeek's router).
    """
    root = tmp_path_factory.mktemp("saved")
    for family in families.FAMILIES:
        model = families.make(family)
        model.save_pretrained(first := str(root / "first" / family))
        type(model).from_pretrained(first, dtype=torch.bfloat16).save_pretrained(str(root / family))
    return [(family, str(root / family)) for family in families.FAMILIES]


def export_each(todo, root, cases):
    """Build, partition, export in each case (stage, ranges); rank 0 compares with save_pretrained's folder."""
    import torch.distributed as dist

    from bigtrain.models.source import set_config_dtype
    from bigtrain.weights import export_model

    bad = {}
    for family, theirs in todo:
        model = families.make(family)
        set_config_dtype(model.config, torch.bfloat16)  # in nested configs too, as from_pretrained does
        for stage, ranges in cases:  # stage 0 before stage 3
            if stage == 3 and not hasattr(next(model.parameters()), "ds_id"):
                partition(model)
            mine = f"{root}/{family}.{stage}.{ranges}"
            try:
                report = export_model(model, mine, dtype="bfloat16", ranges=ranges, max_shard_bytes=30_000)
                why = different(theirs, mine, report) if dist.get_rank() == 0 else ""
                if why:
                    bad[family, stage, ranges] = why
            except Exception as error:
                import traceback

                bad[family, stage, ranges] = "".join(traceback.format_exception(error)[-6:])
    return bad


def bytes_in(folder):
    """name -> the bytes of every tensor in a folder."""
    from bigtrain.weights.folder import open_folder

    out = {}
    for name, info in open_folder(folder).tensors.items():
        with open(info.file, "rb") as file:
            file.seek(info.begin)
            out[name] = file.read(info.nbytes)
    return out


def different(theirs, mine, report):
    """Why the exported folder is not what transformers itself writes; '' if it is, but for the cut into shards."""
    if keys_in(theirs) != keys_in(mine):
        return f"keys: {sorted(set(keys_in(theirs).items()) ^ set(keys_in(mine).items()))[:6]}"
    a, b = bytes_in(theirs), bytes_in(mine)
    wrong = [name for name in a if a[name] != b[name]]
    sizes = sum(os.path.getsize(f"{mine}/{name}") for name in report.files)
    if wrong or sizes != report.bytes:
        return f"values: {wrong}, sizes {sizes} {report.bytes}"
    with open(f"{mine}/config.json") as one, open(f"{theirs}/config.json") as two:
        one, two = json.load(one), json.load(two)
    return "" if one == two else f"config: {[(k, one.get(k), two.get(k)) for k in {*one, *two} if one.get(k) != two.get(k)]}"


@pytest.mark.parametrize(
    "world,cases",
    [(1, [(0, True), (3, False)]), (2, [(0, True), (0, False), (3, True), (3, False)]), (3, [(3, True), (3, False)])],
)
def test_families_equal_save_pretrained(rank_pool, saved, tmp_path, world, cases):
    for bad in rank_pool(world).run(export_each, saved, str(tmp_path), cases, limit_s=400):
        assert not bad, "\n".join(f"{family}: {why}" for family, why in bad.items())


def _started(model, stage, lr):
    """DeepSpeed's engine around the model, partitioned at stage 3."""
    from bigtrain import zero

    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 50},
    }  # fmt: skip
    if stage == 3:
        partition(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return zero.initialize(model, config, optimizer=torch.optim.AdamW(trained, lr=lr))


def train_export_reload(todo, root, stage):
    """Real steps under ZeRO, export, plain from_pretrained: equal logits (fp32 export of fp32 weights, or bf16 of bf16)."""
    import torch.distributed as dist

    from bigtrain.weights import export_model

    bad = {}
    for family in todo:
        model = families.make(family)
        model.config._experts_implementation = "eager"
        engine = _started(model, stage, lr=1e-2)
        batch = families.inputs(family, model)
        labels = (
            torch.zeros(2, dtype=torch.long) if family in ("vit", "resnet") else batch.get("decoder_input_ids")
        )  # None but for T5
        labels = (labels if labels is not None else batch["input_ids"]).contiguous()
        before = engine(**batch, labels=labels)
        engine.backward(before.loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            trained = engine(**batch).logits
        out = f"{root}/{family}.{stage}"
        export_model(engine.module, out, dtype="bfloat16")
        if dist.get_rank() == 0:
            with torch.no_grad():
                again = type(model).from_pretrained(out, dtype=torch.bfloat16, experts_implementation="eager").eval()
                loaded = again(**batch).logits
            if torch.equal(before.logits, trained) or not torch.equal(loaded, trained):
                bad[family] = f"logits differ by {(loaded - trained).abs().max()}"
    return bad


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_B74_B75_trained_models_reload_with_equal_logits(rank_pool, tmp_path, stage):
    todo = [*families.LANGUAGE, "t5", "vit"] if stage == 3 else ["llama", "qwen3_moe", "bert"]
    bad = rank_pool(2).run(train_export_reload, todo, str(tmp_path), stage, limit_s=400)[0]
    assert not bad, "\n".join(f"{family}: {why}" for family, why in bad.items())


def export_case(case, out):
    """One export of a ZeRO-3 model with something special about it; the report, or the error."""
    import time

    import torch.distributed as dist

    from bigtrain import ranks
    from bigtrain.weights import export, export_model, write

    model = families.make("llama")
    tokenizer = None
    model.config.use_cache = False

    class Info:
        use_cache = True

    if case == "resized":
        model.resize_token_embeddings(140)
    if case == "resized behind the config's back":
        model.model.embed_tokens.weight = torch.nn.Parameter(torch.ones(140, 36, dtype=torch.bfloat16))
        model.tie_weights()
    if case == "frozen":
        model.model.embed_tokens.requires_grad_(False)
    partition(model)
    if case == "compiled":
        model.model.layers[0] = torch.compile(model.model.layers[0])
    if case == "hollow":
        for param in model.parameters():
            param.ds_shape = torch.Size([0])
    if case == "tokenizer":

        class Tokenizer:
            def save_pretrained(self, folder):
                assert not any(name.endswith(".safetensors") for name in os.listdir(folder)), "small files come first"
                with open(f"{folder}/tokenizer.json", "w") as file:
                    file.write("{}")

        tokenizer = Tokenizer()
        model.bigtrain_info = Info()
    real, kept = write.Writer.run, (ranks.CONTROL_TIMEOUT_S, ranks._control)
    if case in ("slow", "fails"):

        def run(self, ops):
            if case == "fails" and dist.get_rank() == 1:
                raise OSError("no space left")
            time.sleep(5.0 if case == "slow" and dist.get_rank() == 0 else 0.0)
            return real(self, ops)

        write.Writer.run = run
        ranks.CONTROL_TIMEOUT_S, ranks._control = 3.0 if case == "slow" else kept[0], None
    try:
        return export_model(model, out, dtype="float32" if case == "fp32" else torch.bfloat16, tokenizer=tokenizer)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        write.Writer.run = real
        ranks.CONTROL_TIMEOUT_S, ranks._control = kept
        del export


def test_special_models_export(rank_pool, tmp_path):
    import transformers

    reference = families.make("llama")
    for case in ("tied", "frozen", "resized", "compiled", "tokenizer", "fp32"):
        out = str(tmp_path / case)
        report = rank_pool(2).run(export_case, case, out)[0]
        assert not isinstance(report, tuple), report
        dtype = torch.float32 if case == "fp32" else torch.bfloat16
        again = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert again.dtype == dtype and again.lm_head.weight is again.model.embed_tokens.weight
        for name, value in reference.state_dict().items():
            assert torch.equal(again.state_dict()[name][: len(value)].to(value.dtype), value), (case, name)
        assert "lm_head.weight" not in keys_in(out) and sorted(os.listdir(tmp_path))[0][0] != "."
        with open(f"{out}/config.json") as file:
            config = json.load(file)
        assert config["dtype"] == str(dtype).removeprefix("torch.") and config["use_cache"] is (case == "tokenizer")
    assert os.path.exists(tmp_path / "tokenizer" / "tokenizer.json")


def test_B75_empty_or_unloadable_models_are_refused_before_anything_is_written(rank_pool, tmp_path):
    for case, words in [
        ("hollow", ("refusing to write", "empty tensors")),
        ("resized behind the config's back", ("could not be loaded again", "[140, 36]", "[131, 36]", "vocab_size")),
    ]:
        results = rank_pool(2).run(export_case, case, str(tmp_path / "out"))
        assert all(name in ("WeightsError", "RanksDisagreeError") for name, _ in results), results
        assert all(word in text for _, text in results for word in words), results
        assert not os.listdir(tmp_path)


def test_B76_the_others_wait_for_a_slow_writer(rank_pool, tmp_path):
    """The control group gives up after 3 s, the writer takes 5."""
    out = str(tmp_path / "out")
    for report in rank_pool(2).run(export_case, "slow", out):
        assert not isinstance(report, tuple), report
    assert sorted(os.listdir(out)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_failed_write_stops_all_ranks_and_leaves_nothing(rank_pool, tmp_path):
    first, second = rank_pool(2).run(export_case, "fails", str(tmp_path / "out"))
    assert second == ("OSError", "no space left") and first[0] == "RanksDisagreeError" and "no space left" in first[1]
    assert not os.listdir(tmp_path)


def test_an_earlier_export_is_replaced_and_other_folders_are_not(rank_pool, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        assert not isinstance(rank_pool(2).run(export_case, "tied", str(out))[0], tuple)
    (out / "results.csv").write_text("1,2")
    assert all("results.csv" in text for _, text in rank_pool(2).run(export_case, "tied", str(out)))
    assert (out / "results.csv").exists() and (out / "model.safetensors").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    for name, text in rank_pool(2).run(export_case, "tied", str(tmp_path / "home")):
        assert name in ("UsageError", "RanksDisagreeError") and "letter.txt" in text
    assert sorted(os.listdir(tmp_path)) == ["home", "out"] and os.listdir(tmp_path / "home") == ["letter.txt"]


def lora(root, stage):
    """Train LoRA on a ZeRO-3 model, save the adapter; the reference is gathered tensor by tensor."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    from bigtrain.weights import export_model
    from bigtrain.weights.adapters import export_adapter

    base = families.make("llama")
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)).to(torch.bfloat16)
    engine = _started(model, stage, lr=1e-1)
    batch = families.inputs("llama", base)
    loss = engine(**batch, labels=batch["input_ids"]).loss
    engine.backward(loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        logits = engine(**batch).logits
    names = export_adapter(engine.module, f"{root}/adapter")
    with pytest.raises(UsageError, match="export_adapter"):
        export_model(engine.module, f"{root}/whole", dtype="bfloat16")
    if dist.get_rank() == 0:
        torch.save(logits, f"{root}/logits.pt")
    return names


@pytest.mark.parametrize("stage", [2, 3])
def test_B17_adapters_are_saved_in_full_shape(rank_pool, tmp_path, stage):
    from peft import PeftModel
    from safetensors.torch import load_file

    names = rank_pool(2).run(lora, str(tmp_path), stage)[1]
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert sorted(saved) == names and len(names) == 8
    assert {tuple(v.shape) for v in saved.values()} == {(3, 36), (36, 3), (3, 58)}
    assert all("lora_" in name for name in names) and any(v.abs().max() > 0.05 for k, v in saved.items() if "lora_B" in k)
    base = families.make("llama")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").to(torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(**families.inputs("llama", base)).logits
    assert torch.equal(logits, torch.load(tmp_path / "logits.pt"))
    assert all(torch.equal(before[k], v) for k, v in model.unload().state_dict().items())


def prompts(root):
    """Prompt tuning at stage 3: peft runs the prompt's embedding for its values."""
    from peft import PromptTuningConfig, get_peft_model

    from bigtrain import zero
    from bigtrain.weights.adapters import export_adapter

    base = families.make("llama")
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).to(torch.bfloat16)
    engine = _started(model, 3, lr=1e-1)
    batch = families.inputs("llama", base)
    engine.backward(engine(**batch, labels=batch["input_ids"]).loss)
    engine.step()
    export_adapter(engine.module, f"{root}/adapter")
    held = engine.module.prompt_encoder["default"].embedding.weight
    with zero.gathered([held]):
        return held.detach().clone()


def test_trained_prompts_are_saved_at_stage_3(rank_pool, tmp_path):
    """One rank alone asked for them, and the gather waited for the others."""
    from safetensors.torch import load_file

    held, _ = rank_pool(2).run(prompts, str(tmp_path))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert list(saved) == ["prompt_embeddings"] and held.shape == (3, 36) and torch.equal(saved["prompt_embeddings"], held)
