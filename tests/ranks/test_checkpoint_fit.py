"""What is said of checkpoints before anything is built: that one is another run's, and how large this run's will be."""

import json
from types import SimpleNamespace

import pytest
import torch

from bigtrain import ranks
from bigtrain.checkpoint import fit, live, store
from bigtrain.checkpoint.slices import share_of
from bigtrain.engine import Engine
from bigtrain.errors import UsageError
from bigtrain.models import build_model
from bigtrain.run import disk
from bigtrain.run.runfolder import RunFolder
from tests.ranks import scripts
from tests.ranks.test_train import TRAIN, demo, environment, flags  # noqa: F401
from tests.ranks.tiny import TinyLM, config, rows


def _sizes(cases):
    """Of each case: bytes said before the first step, and bytes that a save writes after one, over all ranks."""
    found = []
    for stage, optimizer, bf16 in cases:
        cfg = config(stage, bf16=bf16, micro=1, accumulation=1)
        plain = TinyLM(width=34)
        plain.embed.weight.requires_grad_(False)
        dtype = torch.bfloat16 if bf16 else torch.float32
        model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=1, freeze=["embed"], dtype=dtype)
        engine = Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-3, total_steps=20, hang_s=None)
        engine.train_step(rows(0, engine.world_size)[engine.rank :: engine.world_size])
        mine = share_of(live.slices_of(engine), ranks.rank(), ranks.world_size())
        written = ranks.sum_across(sum(s.tensor.nbytes for s in mine))
        found.append((fit.checkpoint_bytes(plain, engine.settings.optimizer, bf16), written))
        engine.close()
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_the_size_said_before_the_first_step_is_what_is_written(rank_pool, world):
    exact = [
        (0, "adamw", True),
        (1, "adamw_torch", False),
        (2, "muon", True),
        (3, "adamw_split", True),
        (3, "adamw_split_bf16", True),
    ]
    pairs = rank_pool(world).run(_sizes, exact)[0]
    assert [said for said, _ in pairs] == [written for _, written in pairs]
    for said, written in rank_pool(world).run(_sizes, [(2, "adamw_8bit", True), (3, "adamw_split_8bit", True)])[0]:
        # Each rank's small tensors keep fp32 moments (6 bytes an element more), and blocks of 256 are cut anew.
        assert abs(said - written) < 6 * 4096 * world


def test_too_little_disk_is_said_before_the_model_is_built(tmp_path, monkeypatch, caplog):
    args = SimpleNamespace(
        resume_from_checkpoint=None, no_export=True, save_steps=2, save_strategy="steps", save_total_limit=2, keep_every=None,
        load_best_model_at_end=False, save_only_model=False,
    )  # fmt: skip
    job = SimpleNamespace(args=args, checkpoint_bytes=2**30, model_bytes=2**29, steps=SimpleNamespace(steps=10))
    for free, said in ((2**30, "a checkpoint of this run takes 1.06 GiB"), (2 * 2**30, "writes up to 3 more"), (4 * 2**30, "")):
        monkeypatch.setattr(disk, "free_bytes", lambda _, free=free: free)
        caplog.clear()
        if free == 2**30:
            with pytest.raises(UsageError, match=said):
                disk.check(job, RunFolder(tmp_path), 0)
        else:
            disk.check(job, RunFolder(tmp_path), 0)
            assert said in caplog.text and bool(said) == bool(caplog.text)
    monkeypatch.setattr(disk, "free_bytes", lambda _: 2**30)
    job.checkpoint_bytes = 2**29
    for more, said in (
        ({"load_best_model_at_end": True}, "4 more"),
        ({"keep_every": 4}, "5 more"),
        ({"save_only_model": True}, "3 more"),
    ):
        args.__dict__.update({"load_best_model_at_end": False, "keep_every": None, **more})
        caplog.clear()
        disk.check(job, RunFolder(tmp_path), 0)
        assert f"{said} checkpoint(s) of 0.50 GiB" in caplog.text


def _refused(words, **more):
    said = scripts.run([TRAIN, *words], environment(), 2, 2)
    assert "Nothing was built" in said and "Traceback" not in said and "with who decided it" not in said, said[-3000:]
    assert said.count("cannot go on from") == 1
    return said


def test_a_resume_with_another_optimizer_or_model_is_refused_before_anything_is_built(demo, tmp_path):  # noqa: F811
    out = tmp_path / "a run"
    scripts.run([TRAIN, *flags(demo, out, max_steps=1, save_steps=1, no_export=True)], environment(), 0, 2)
    again = {"max_steps": 2, "resume_from_checkpoint": "auto", "no_export": True}
    assert "optimizer: 'adamw' in the checkpoint, 'adamw_split' in this run" in _refused(
        flags(demo, out, optim="adamw_split", **again)
    )
    shape = json.loads((out / "checkpoint-1" / "model" / "config.json").read_text())
    for name, change, said in (
        ("wider", {"intermediate_size": 2 * shape["intermediate_size"]}, "mlp.up_proj.weight: shape"),
        ("shorter", {"num_hidden_layers": 1}, "this one lacks (model.layers.1"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**shape, **change}))
        assert said in _refused(flags(demo, out, model_name_or_path=tmp_path / name, **again))
    assert "trained in the checkpoint and frozen in this run" in _refused(flags(demo, out, freeze="embed_tokens", **again))
    assert store.steps(out) == [1]
