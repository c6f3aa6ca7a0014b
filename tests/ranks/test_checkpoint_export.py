"""`bigtrain verify`, `inspect` and `export` on checkpoints of real engines."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigtrain import cli
from bigtrain.engine import Engine
from bigtrain.models import build_model
from bigtrain.weights import export_model
from bigtrain.zero import flat
from tests import torchrun
from tests.ranks import families
from tests.ranks.test_checkpoint_engine import _engine, _step
from tests.ranks.tiny import VOCAB, config, rows


def _llama(root, stage, optimizer):
    from transformers import LlamaConfig

    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    source = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    model = build_model(source, ds_config=cfg)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-2, hang_s=None)
    for step in range(2):
        engine.train_step(rows(step, 4)[engine.rank :: engine.world_size])
    engine.save_checkpoint(root / "run")
    engine.export(root / "direct")
    engine.close()


@pytest.mark.parametrize(
    ("stage", "optimizer"), [(0, "adamw_torch"), (2, "adamw_torch"), (3, "adamw_torch"), (3, "adamw_split")]
)
def test_export_of_a_checkpoint_equals_the_engines_own(rank_pool, tmp_path, stage, optimizer, capsys):
    rank_pool(2).run(_llama, tmp_path, stage, optimizer)
    assert cli.main(["verify", str(tmp_path / "run")]) == 0
    assert "whole. Step 2, 2 ranks" in capsys.readouterr().out
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert cli.main(words) == 0
    assert f"{tmp_path / 'run' / 'checkpoint-2'} -> {tmp_path / 'out'}: " in capsys.readouterr().out
    there = (tmp_path / "out" / "model.safetensors").stat().st_ino
    assert cli.main(words) == 2 and (tmp_path / "out" / "model.safetensors").stat().st_ino == there
    assert "model.safetensors: name another folder, or add --overwrite" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0 and (tmp_path / "out" / "model.safetensors").stat().st_ino != there
    want, got = load_file(tmp_path / "direct" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(want) == set(got) and len(got) > 10
    assert [n for n in want if not torch.equal(want[n], got[n])] == []
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads((tmp_path / "direct" / name).read_text())
    capsys.readouterr()
    assert cli.main(["inspect", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "step 2, written by 2 ranks" in text and "config.json" in text and f"optimizer: {optimizer}" in text
    assert cli.main(["inspect", str(tmp_path / "run" / "checkpoint-2"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert cli.main(["inspect", str(tmp_path / "out")]) == 0
    onto_itself = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--overwrite", "--model", str(tmp_path / "out")]
    assert cli.main(onto_itself) == 2
    assert "is the model folder itself" in capsys.readouterr().err  # the base model's weights were replaced


def _train(root, family, stage, optimizer):
    """Two steps; the checkpoint, and exports by byte ranges and by gathering."""
    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    source = families.make(family).config
    for part in (source, source.get_text_config()):
        part._experts_implementation = "eager"  # grouped products want rows of 16 bytes
    engine = Engine(build_model(source, ds_config=cfg), ds_config=cfg, optimizer=optimizer, learning_rate=1e-2, hang_s=None)
    for step in range(2):
        engine.train_step(rows(step, 2 * engine.world_size)[engine.rank :: engine.world_size])
    engine.save_checkpoint(root / "run")
    for dtype in ("bfloat16", "float32", "float16"):
        engine.export(root / f"direct.{dtype}", dtype)
    master_of = flat.master_of(engine.deepspeed.optimizer)
    export_model(engine.module, root / "gathered", dtype="float32", ranges=False, master_of=master_of)
    engine.close()


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (3, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("family", ["llama", "ernie_vl_moe"])
def test_both_exports_have_the_same_bytes(rank_pool, tmp_path, world, stage, family):
    """What is written in fp32 (routers, and all of an fp32 export) came from the rounded weights in one and from the masters in the other."""
    rank_pool(world).run(_train, tmp_path, family, stage, "adamw_torch")
    for dtype in ("bfloat16", "float32", "float16"):
        assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / dtype), "--dtype", dtype]) == 0
        own, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in (f"direct.{dtype}", dtype))
        assert own == again, (dtype, differing(tmp_path / f"direct.{dtype}", tmp_path / dtype))
    assert (tmp_path / "gathered" / "model.safetensors").read_bytes() == (
        tmp_path / "float32" / "model.safetensors"
    ).read_bytes()
    values = load_file(tmp_path / "float32" / "model.safetensors").items()
    # Of what both trained (no image was seen, and not every expert), not rounded anywhere.
    assert all(not torch.equal(v, v.bfloat16().float()) for name, v in values if name.endswith("q_proj.weight"))


def differing(one, two):
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    return [name for name in a if not torch.equal(a[name], b[name])]


def _custom(root):
    engine = _engine(3)
    _step(engine, 0)
    engine.save_checkpoint(root)
    engine.close()


def test_export_of_a_model_without_config_and_refusal_of_damage(rank_pool, tmp_path, capsys):
    rank_pool(2).run(_custom, tmp_path / "run")
    words = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float32", "--tag", "1"]
    assert cli.main(words) == 0
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got["embed.weight"].shape == (64, 34) and got["embed.weight"].dtype == torch.float32
    data = next(Path(tmp_path / "run" / "checkpoint-1").glob("rank-00001*.safetensors"))
    size = data.stat().st_size
    header = int.from_bytes(data.read_bytes()[:8], "little") + 8
    with open(data, "r+b") as file:
        file.seek(header + 4)  # the first slice is a master
        byte = file.read(1)
        file.seek(header + 4)
        file.write(bytes([byte[0] ^ 1]))
    assert data.stat().st_size == size
    assert cli.main([*words[:2], str(tmp_path / "again"), *words[3:]]) == 1
    assert "is damaged: master of" in capsys.readouterr().err and not (tmp_path / "again").exists()
    assert cli.main(["verify", str(tmp_path / "run")]) == 1
    assert "rank-00001-of-00002.safetensors is damaged: master of" in capsys.readouterr().err


def test_the_verb_starts_its_ranks(rank_pool, tmp_path):
    """Under torchrun each rank waited for ever: nobody had made a process group."""
    rank_pool(1).run(_llama, tmp_path, 2, "adamw_torch")
    command = [*torchrun(2), "-m", "bigtrain", "export", str(tmp_path / "run"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tensors") == 1
    ours, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "direct"))
    assert all(torch.equal(ours[n].float(), direct[n].float()) for n in direct)
