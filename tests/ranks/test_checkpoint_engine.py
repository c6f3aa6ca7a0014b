"""Checkpoints of real engines: resume bit for bit, and the same state on any number of ranks, stage and placement."""

import json
import threading
from pathlib import Path

import bench_checkpoint_gpu
import pytest
import torch
import xxhash
from transformers import LlamaConfig

from bigtrain import ranks
from bigtrain.checkpoint import live, native, snapshot, store
from bigtrain.checkpoint.blocks import MOMENTS
from bigtrain.checkpoint.save import Saver
from bigtrain.checkpoint.verify import verify
from bigtrain.engine import Engine
from bigtrain.errors import BigtrainError
from bigtrain.models import build_model
from bigtrain.optim import arithmetic
from tests.ranks.tiny import Branched, TinyLM, config, rows

SAMPLES = 6  # a multiple of 1, 2 and 3 ranks; four take twice as many


def _engine(stage, optimizer="adamw_torch", dropout=0.0, offload=False, seed=1):
    cfg = config(stage, bf16=True, micro=1, accumulation=1)
    if offload:
        cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    model = build_model(
        lambda: TinyLM(width=34, dropout=dropout), ds_config=cfg, seed=seed
    )  # odd sizes: every partition has padding
    return Engine(model, ds_config=cfg, optimizer=optimizer, learning_rate=1e-3, total_steps=20, warmup_steps=2, hang_s=None)


def _step(engine, step):
    samples = rows(step, SAMPLES if SAMPLES % engine.world_size == 0 else 2 * SAMPLES)
    return engine.train_step(samples[engine.rank :: engine.world_size])


def _state(engine) -> dict[str, str]:
    """A hash of every logical tensor, put together from all ranks."""
    parts = [
        (f"{s.kind}/{s.param}", s.start, s.tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        for s in live.slices_of(engine)
        if not s.replicated or engine.rank == 0
    ]
    merged: dict[str, list] = {}
    for name, start, raw in (p for parts in ranks.all_gather_object(parts) for p in parts):
        merged.setdefault(name, []).append((start, raw))
    return {n: xxhash.xxh3_64_hexdigest(b"".join(raw for _, raw in sorted(p))) for n, p in merged.items()}


def _save_after(root, stage, optimizer, offload=False, steps=3):
    engine = _engine(stage, optimizer, offload=offload)
    for step in range(steps):
        _step(engine, step)
    engine.data_position = 17
    engine.save_checkpoint(root, state={"note": "x"})
    state = _state(engine)
    engine.close()
    return state


def _load(root, stage, optimizer, offload=False):
    engine = _engine(stage, optimizer, offload=offload, seed=99)
    user = engine.load_checkpoint(root)
    state = _state(engine)
    before = (engine.global_step, engine.data_position, user, engine.lr)
    loss = _step(engine, 3).loss
    engine.close()
    return state, before, loss


def _resume(root, stage, optimizer, dropout):
    """Losses of six steps: unbroken, and with a save after three into a fresh engine. Saving goes on beside training."""
    engine = _engine(stage, optimizer, dropout)
    unbroken = []
    for step in range(6):
        unbroken.append(_step(engine, step))
        if step == 2:
            engine.save_checkpoint(root, wait=False)
    end = _state(engine)
    engine.close()
    engine = _engine(stage, optimizer, dropout, seed=99)
    engine.load_checkpoint(root)
    resumed = [_step(engine, step) for step in range(3, 6)]
    again = _state(engine)
    engine.close()
    facts = [[(r.step, r.loss, r.lr, r.grad_norm) for r in run] for run in (unbroken[3:], resumed)]
    return facts, end == again


@pytest.mark.parametrize(
    "optimizer", ["adamw_torch", "adamw", "adamw_8bit", "muon", "adamw_split", "adamw_split_bf16", "adamw_split_8bit"]
)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_B29_resume_is_bit_exact(rank_pool, tmp_path, stage, optimizer):
    if stage == 0 and optimizer.startswith("adamw_split"):
        pytest.skip("adamw_split needs stages 1 to 3")
    for facts, same in rank_pool(2).run(_resume, str(tmp_path), stage, optimizer, 0.1):
        assert facts[0] == facts[1]
        assert same


def test_B26_counters_and_loss_on_other_ranks_and_stages(rank_pool, tmp_path):
    """State is compared by tests/ranks/test_checkpoint_reshard.py."""
    want = rank_pool(2).run(_save_after, str(tmp_path), 3, "adamw_torch")[0]
    assert want and store.steps(tmp_path) == [3]
    losses = []
    for other, to in ((2, 3), (1, 0), (3, 1), (3, 2)):
        for state, before, loss in rank_pool(other).run(_load, str(tmp_path), to, "adamw_torch"):
            assert state == want, (other, to, [k for k in want if want[k] != state.get(k)])
            assert before[:3] == (3, 17, {"note": "x"})
            losses.append(loss)
    # One global batch, the same weights: only the order of bf16 gradient sums and partial losses differs, 2^-8 relative each.
    assert max(losses) - min(losses) < 0.01 * min(losses)


def _go_on(root, stage, offload):
    engine = _engine(stage, "adamw", offload=offload, seed=99)
    engine.load_checkpoint(root)
    losses = [_step(engine, step).loss for step in (3, 4)]
    engine.close()
    return losses


def test_the_optimizer_goes_on_where_it_is_offloaded_no_more_and_the_other_way_round(rank_pool, tmp_path):
    """DeepSpeed's CPU Adam counts its steps in an int, torch's in a tensor: the step after such a load failed."""
    losses = []
    for saved in (True, False):
        rank_pool(2).run(_save_after, str(tmp_path / f"{saved}"), 2, "adamw", saved)
        for stage, offload in ((0, False), (1, False), (3, False), (2, True)):
            losses += rank_pool(2).run(_go_on, str(tmp_path / f"{saved}"), stage, offload)
    for step in zip(
        *losses
    ):  # rounded to bf16 in another order, see above; the steps before are those of one optimizer or the other
        assert max(step) - min(step) < 0.01 * min(step)


def _load_says(root, stage, optimizer):
    engine = _engine(stage, optimizer)
    try:
        engine.load_checkpoint(root)
    except BigtrainError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def _moments(engine) -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """(kind, parameter) -> its 8-bit moment decoded, and the scale of each value's block (0 where it is kept in fp32)."""
    parts = []
    for flat in live.flat_tensors(engine):
        for kind, (scale_kind, signed) in MOMENTS.items():
            held = flat.state[kind].view(-1)
            values, scales = held.float(), torch.zeros(held.numel())
            if held.dtype == torch.uint8:
                values = arithmetic.decode(held, flat.state[scale_kind], signed)
                scales = flat.state[scale_kind].repeat_interleave(256)[: held.numel()]
            for name, _, start, at, count in flat.pieces:
                parts.append(((kind, name), start, values[at : at + count].clone(), scales[at : at + count].clone()))
    merged: dict = {}
    for rank, told in enumerate(ranks.all_gather_object(parts)):
        for key, start, values, scales in told:
            if rank == 0 or engine.stage > 0:
                merged.setdefault(key, []).append((start, values, scales))
    return {key: tuple(torch.cat([p[i] for p in sorted(ps, key=lambda p: p[0])]) for i in (1, 2)) for key, ps in merged.items()}


def _exact(engine) -> dict[str, str]:
    return {k: h for k, h in _state(engine).items() if k.split("/")[0] in ("master", "weight", "low", "buffer")}


def _save_8bit(root, stage, optimizer):
    engine = _engine(stage, optimizer)
    for step in range(3):
        _step(engine, step)
    engine.save_checkpoint(root)
    told = _exact(engine), _moments(engine)
    engine.close()
    return told


def _load_8bit(root, stage, optimizer):
    engine = _engine(stage, optimizer, seed=99)
    engine.load_checkpoint(root)
    told = _exact(engine), _moments(engine)
    loss = _step(engine, 3).loss
    engine.close()
    return *told, loss


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "adamw_split_8bit"])
def test_B26_8bit_moments_move_half_a_code_step_at_most(rank_pool, tmp_path, optimizer):
    exact, moments = rank_pool(2).run(_save_8bit, str(tmp_path), 2, optimizer)[0]
    losses = []
    for world, stage in ((2, 2), (3, 3), *([(2, 0)] if optimizer == "adamw_8bit" else [])):
        got_exact, got, loss = rank_pool(world).run(_load_8bit, str(tmp_path), stage, optimizer)[0]
        assert got_exact == exact, (world, stage)
        assert got.keys() == moments.keys()
        losses.append(loss)
        for (kind, name), (values, scales) in got.items():
            want = moments[kind, name][0]
            if (world, stage) == (2, 2):
                assert torch.equal(values, want)
            codes, _, _ = arithmetic.code_tables(MOMENTS[kind][1], torch.device("cpu"))
            ratio = (want / scales.masked_fill(scales == 0, 1)).clamp(codes[0], 1)
            upper = torch.searchsorted(codes, ratio).clamp(1, 255)
            half = (codes[upper] - codes[upper - 1]) / 2
            if kind == "state2":  # what is not zero stays so: the smallest code is taken for all below it
                half = torch.where(ratio < codes[1], codes[1], half)
            allowed = half * scales * (1 + 1e-5) + 1e-6 * want.abs()  # rounding of the products to fp32
            assert ((values - want).abs() <= allowed).all(), (world, stage, kind, name)
    assert max(losses) - min(losses) < 0.01 * min(losses)


def _padded(root, stage):
    """All optimizer state of a model with odd numbers of elements, padding included, when saved and after loading."""

    def fresh():
        torch.manual_seed(0)
        cfg = config(stage, micro=4)
        return Engine(Branched(15), ds_config=cfg, optimizer="adamw_split_8bit", learning_rate=1e-2)

    def state(engine):
        inner = engine.deepspeed.optimizer.optimizer
        return [(k, t.tolist()) for s in inner.state.values() for k, t in sorted(s.items()) if isinstance(t, torch.Tensor)]

    engine = fresh()
    engine.backward(engine(torch.randn(4, 15, generator=torch.Generator().manual_seed(engine.rank), dtype=engine.dtype)))
    engine.step()
    engine.save_checkpoint(root)
    saved = state(engine)
    engine.close()
    engine = fresh()
    engine.load_checkpoint(root)
    loaded = state(engine)
    engine.close()
    return len(saved) > 0 and saved == loaded


@pytest.mark.parametrize("stage", [1, 3])
def test_padding_of_8bit_moments_comes_back_as_zero(rank_pool, tmp_path, stage):
    """It shares its block's scale with the last elements that are not padding."""
    assert rank_pool(2).run(_padded, str(tmp_path), stage) == [True, True]


def test_other_optimizer_is_explained(rank_pool, tmp_path):
    rank_pool(2).run(_save_after, str(tmp_path / "a"), 2, "adamw_torch")
    for said in rank_pool(2).run(_load_says, str(tmp_path / "a"), 2, "muon"):
        assert "optimizer: 'adamw_torch' in the checkpoint, 'muon' in this run" in said


def _changed(root):
    engine = _engine(2)
    _step(engine, 0)
    folder = engine.save_checkpoint(root)
    run = json.loads((folder / "run.json").read_text())["state"]
    engine.close()
    cfg = config(2, bf16=True, micro=1, accumulation=2)
    model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=1)
    engine = Engine(
        model, ds_config=cfg, optimizer="adamw_torch", learning_rate=2e-3, betas=(0.9, 0.95), total_steps=20, hang_s=None
    )
    engine.load_checkpoint(root)
    told = live.changed_settings(run, live.run_state(engine))
    engine.close()
    return told


def test_changed_settings_are_told_one_by_one(rank_pool, tmp_path):
    assert rank_pool(2).run(_changed, str(tmp_path))[0] == [
        "learning_rate: 0.001 in the checkpoint, 0.002 in this run",
        "warmup_steps: 2 in the checkpoint, 0 in this run",
        "betas: [0.9, 0.999] in the checkpoint, [0.9, 0.95] in this run",
        "global_batch: 2 in the checkpoint, 4 in this run",
    ]


def _other_config(root):
    def make(theta):
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
        model_config = LlamaConfig(**shape, rope_parameters={"rope_type": "default", "rope_theta": theta})
        return Engine(build_model(model_config, ds_config=config(1)), ds_config=config(1), optimizer="adamw_torch", hang_s=None)

    told = []
    for theta in (1e4, 5e5):
        engine = make(theta)
        if theta == 1e4:
            engine.save_checkpoint(root)
        engine.load_checkpoint(root)
        told.append(native.changed_config(store.find(Path(root)), engine.module, engine.dtype))
        engine.close()
    return told


def test_a_changed_model_config_is_told_where_no_shape_shows_it(rank_pool, tmp_path):
    same, (line,) = rank_pool(2).run(_other_config, str(tmp_path))[0]
    assert same == [] and line.startswith("config.rope_parameters: ") and "10000.0" in line and "500000.0" in line
    (tmp_path / "checkpoint-0" / "model" / "config.json").write_text("{}")
    assert "config.json is damaged: it has 2 bytes" in rank_pool(2).run(_told_of, str(tmp_path))[0][0]


def _told_of(root):
    module = torch.nn.Module()
    module.config = LlamaConfig()
    return native.changed_config(store.find(Path(root)), module, torch.bfloat16)


def _loaded_after_an_evaluation(root):
    told = []
    for seed in (1, 5):
        cfg = config(3)
        model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=seed, freeze=("embed", "blocks.0"))
        engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-2, hang_s=None)
        _step(engine, 0)
        if seed == 1:
            engine.save_checkpoint(root)
        else:
            engine.evaluate([rows(9)[engine.rank]])
            engine.load_checkpoint(root)
        told.append((engine.evaluate([rows(9)[engine.rank]]).loss, _step(engine, 2).loss))
        engine.close()
    return told


def test_whole_weights_that_an_evaluation_left_behind_do_not_outlive_a_load(rank_pool, tmp_path):
    for saved, loaded in rank_pool(2).run(_loaded_after_an_evaluation, str(tmp_path)):
        assert saved == loaded


def _two_tags(root):
    engine = _engine(3)
    early = {}
    for step in range(2):
        _step(engine, step)
        engine.save_checkpoint(root)
        early[step + 1] = _state(engine)
    engine.load_checkpoint(root, tag=1)
    one = _state(engine)
    engine.load_checkpoint(root)
    two = _state(engine)
    engine.close()
    return one == early[1], two == early[2]


def test_B25_the_tag_asked_for_is_the_tag_loaded(rank_pool, tmp_path):
    assert rank_pool(2).run(_two_tags, str(tmp_path)) == [(True, True)] * 2


def _between_backwards(root, stage):
    """A checkpoint is asked for with one of two micro batches done: nothing is changed, and the step goes on."""
    cfg = config(stage, bf16=True, micro=1, accumulation=2)
    engine = Engine(build_model(TinyLM, ds_config=cfg), ds_config=cfg, optimizer="adamw_torch", hang_s=None)
    batches, said = rows(0, 4)[engine.rank :: engine.world_size], []
    engine.save_checkpoint(root)
    engine.backward(engine(**batches[0])["loss"])
    for act in (engine.save_checkpoint, engine.load_checkpoint):
        try:
            act(root)
        except BigtrainError as error:
            said.append(str(error))
    engine.backward(engine(**batches[1])["loss"])
    said.append(engine.step().applied)
    engine.close()
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_no_checkpoint_in_the_middle_of_an_accumulation(rank_pool, tmp_path, stage):
    for save, load, applied in rank_pool(2).run(_between_backwards, str(tmp_path), stage):
        assert "in the middle of an accumulation" in save and "in the middle of an accumulation" in load and applied


def _only_rank_0_saves(root):
    from bigtrain import meeting

    meeting.MEET_S = 3.0
    engine = _engine(2)
    _step(engine, 0)
    if engine.rank == 0:
        try:
            engine.save_checkpoint(root)
        except BigtrainError as error:
            return str(error)
    return "idle"


def test_B24_save_on_rank_0_only_is_named(rank_pool, tmp_path):
    pool = rank_pool(2)
    first, _ = pool.run(_only_rank_0_saves, str(tmp_path))
    pool.stop()  # the control group has timed out
    assert "1" in first and "save" in first


def _frozen(root):
    cfg = config(3, bf16=True, micro=1, accumulation=1)

    def make(seed):
        model = build_model(lambda: TinyLM(width=34), ds_config=cfg, seed=seed)
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
        return Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)

    engine = make(1)
    _step(engine, 0)
    engine.save_checkpoint(root)
    want = _state(engine)
    engine.close()
    engine = make(2)
    engine.load_checkpoint(root)
    got, loss = _state(engine), _step(engine, 1).loss
    engine.close()
    return want == got, any(k.startswith("weight/blocks.0") for k in want), loss


def test_B36_frozen_weights_come_back(rank_pool, tmp_path):
    answers = rank_pool(2).run(_frozen, str(tmp_path))
    assert all(a[0] and a[1] for a in answers) and answers[0][2] == answers[1][2]


def test_B27_nothing_in_a_native_checkpoint_is_unpickled(rank_pool, tmp_path):
    """No module on the load path can unpickle: torch.load and pickle appear only in the reader of DeepSpeed's folders."""
    folder = Path(store.__file__).parent
    for name in (
        "native", "live", "load", "save", "store", "files", "manifest", "reshard", "slices", "verify", "rng", "blocks", "pieces",
        "confirm", "export",
    ):  # fmt: skip
        text = (folder / f"{name}.py").read_text()
        assert "torch.load" not in text and "pickle" not in text, name


def _bench(root):
    argv = ["--model", "preset:llama-tiny", "--seq_len", "16", "--warmup", "1", "--steps", "1", "--dir", root]
    return bench_checkpoint_gpu.measure(bench_checkpoint_gpu.arguments([*argv, "--saves", "training", "at_once"]))


def test_the_gpu_benchmark_measures_and_compares_what_it_loads(rank_pool, tmp_path):
    """On the host here; on a GPU it is launch/bench_checkpoint_gpu.py itself that is the test (docs/results/checkpoint.md)."""
    (result,) = rank_pool(1).run(_bench, str(tmp_path))
    assert result["loaded_equal"] and [row["mode"] for row in result["saves"]] == ["training", "at_once"]
    assert all(row["steps_beside"] >= 1 and row["stall_s"] >= row["call_s"] for row in result["saves"])
    assert {name for row in result["saves"] for name, *_ in row["processor"]["threads"]} >= {"MainThread"}
    assert not any(tmp_path.iterdir())


class Counting(torch.nn.Linear):
    """A module with a state that is neither parameter nor buffer."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def _save_with_extra_state(root):
    cfg = config(2, bf16=True, micro=1, accumulation=1)
    model = build_model(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), Counting(4, 4)), ds_config=cfg, seed=1)
    engine = Engine(model, ds_config=cfg, optimizer="adamw_torch", learning_rate=1e-3, hang_s=None)
    said = []
    native.log.addFilter(lambda record: said.append(record.getMessage()) or True)
    for tag in ("one", "two"):
        engine.save_checkpoint(root, tag=tag)
    engine.close()
    return [text for text in said if "extra state" in text]


def test_state_that_checkpoints_do_not_hold_is_told_once(rank_pool, tmp_path):
    told = rank_pool(2).run(_save_with_extra_state, tmp_path)
    assert [len(texts) for texts in told] == [1, 0]
    assert "of 1 modules, 1: after a resume it begins anew" in told[0][0]


def _first_save_after_preparing(root):
    """Bytes of host memory held before a first save, after it, and after one elsewhere; whether both are whole."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Saver, "always_imaged", True)  # as where all state lies on a GPU
    patch.setattr(snapshot, "BLOCK_BYTES", 1 << 16)
    engine, held = _engine(2), []
    _step(engine, 0)
    engine.checkpoints.prepare(root / "one")
    for step in (1, 2):
        _step(engine, step)
    for thread in threading.enumerate():
        if thread.name == "save-prepare":
            thread.join()
    for folder in ("one", "other"):
        held.append(engine.checkpoints.copied()["held_bytes"])
        engine.save_checkpoint(root / folder, wait=True)
    held.append(engine.checkpoints.copied()["held_bytes"])
    patch.undo()
    engine.close()
    return held, verify(root / "one")[1] + verify(root / "other")[1]


def test_saves_use_the_host_memory_that_was_made_for_them(rank_pool, tmp_path):
    """In another folder as well."""
    for held, damage in rank_pool(2).run(_first_save_after_preparing, tmp_path):
        assert held[0] > 0 and held == [held[0]] * 3 and damage == []


def _prepare_apart(root):
    engine = _engine(1)
    _step(engine, 0)
    with pytest.raises(BigtrainError) as told:
        if engine.rank == 0:
            engine.checkpoints.prepare(root)
        else:
            _step(engine, 1)
    engine.close()
    return str(told.value)


def test_ranks_of_which_one_prepares_for_saves_are_told(rank_pool, tmp_path):
    for said in rank_pool(2).run(_prepare_apart, tmp_path):
        assert "rank 0: engine.checkpoints.prepare()" in said and "rank 1: the start of engine.train_step()" in said


def _save_where_it_was_prepared(root):
    """Whether one saver prepared in a relative folder and saved there, and what lies in a second folder, named between the two."""
    patch = pytest.MonkeyPatch()
    patch.chdir(root)
    engine = _engine(2)
    _step(engine, 0)
    engine.checkpoints.prepare("out")
    prepared, engine.checkpoints.copy_to = engine.checkpoints._saver, root / "far"
    engine.save_checkpoint("out")
    same = engine.checkpoints._saver is prepared
    patch.undo()
    engine.close()
    return same, [path.name for path in (root / "far").iterdir()]


def test_preparing_is_no_first_save(rank_pool, tmp_path):
    """The second folder was looked at when a saver was made, which preparing had done; and `prepare` took paths as they came."""
    assert rank_pool(2).run(_save_where_it_was_prepared, tmp_path) == [(True, ["checkpoint-1"])] * 2
