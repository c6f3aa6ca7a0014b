"""Gradients that leave during backward, inside the engine: the bits of a run in which they stay, with lanes that are `Late`."""

import copy

import pytest
import torch

from bigtrain.engine import Engine
from bigtrain.errors import UsageError
from bigtrain.models import build_model
from tests.ranks.late import Late, stream_late
from tests.ranks.tiny import TinyLM, config, rows, share

SAMPLES = 6


class Varied(TinyLM):
    """With tied or untied embeddings, and a branch that only some batches take."""

    def __init__(self, tied):
        super().__init__(width=34)
        self.branch = torch.nn.Linear(34, 34)
        self.bad = torch.nn.Parameter(torch.zeros(34))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, labels=None, branch=None, poison=None):
        x = self.embed(input_ids) * self.scale.to(self.embed.weight.dtype) + self.bad
        if poison is not None:
            x = x + self.bad * float("nan")
        for block in self.blocks:
            x = block(x)
        if branch is not None:
            x = x + self.branch(x)
        logits = self.head(self.norm(x)).float()
        target = labels[:, 1:].flatten()
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target, ignore_index=-100)}


def _engine(accumulation, optimizer, tied, spilled, late, seed=1):
    cfg = config(2, bf16=True, micro=2, accumulation=accumulation)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    cfg["data_types"] = {"grad_accum_dtype": "bf16"}
    model = build_model(lambda: Varied(tied), ds_config=cfg, seed=seed)
    told = {"learning_rate": 1e-2, "max_grad_norm": 0.5, "hang_s": None, "offload_gradients": spilled}
    engine = Engine(model, ds_config=cfg, optimizer=optimizer, **told)
    if late:
        stream_late(engine, late, gradients=spilled)
    assert engine._reduction.alone
    return engine


def _batches(number, accumulation):
    """Step 2 has a NaN in its first micro batch; the branch is used in step 1 by one micro batch, in step 3 and later by all."""
    batches = share(rows(number, 2 * accumulation, ragged=accumulation == 1), 0, 1, accumulation)
    for i, batch in enumerate(batches):
        if number == 2 and i == 0:
            batch["poison"] = torch.ones(1)
        if number >= 3 or (number == 1 and i == 0):
            batch["branch"] = torch.ones(1)
    return batches


def _story(root, accumulation, optimizer, tied, spilled, late):
    engine = _engine(accumulation, optimizer, tied, spilled, late)
    seen = []

    def step(number):
        result = engine.train_step(_batches(number, accumulation))
        seen.append((result.loss, result.grad_norm, result.applied, result.reason))

    for number in range(4):
        step(number)
    seen.append(engine.evaluate(rows(50, SAMPLES)).loss)
    engine.save_checkpoint(root)
    step(4)
    step(5)
    engine.load_checkpoint(root, 4)
    step(4)
    step(2)
    step(5)
    inner = engine.deepspeed.basic_optimizer
    masters = [inner.master(p) for p in inner.state]
    states = [t.clone() for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    held = engine._reduction.stream.gradients.host_bytes if late and spilled else 0
    total = sum(2 * p.numel() for p in engine.module.parameters())
    engine.close()
    return copy.deepcopy(seen), masters, states, held / total


def _both(root, *what):
    plain = _story(f"{root}/plain", *what, 0.0, None)
    found = []
    for spilled in (0.0, 0.4, 1.0):
        late = _story(f"{root}/late{spilled}", *what, spilled, Late())
        same = all(torch.equal(a, b) for i in (1, 2) for a, b in zip(plain[i], late[i], strict=True))
        found.append((str(plain[0]) == str(late[0]), same, spilled <= late[3] <= spilled + 0.3))
    return plain[0], found


@pytest.mark.parametrize("accumulation, optimizer, tied", [
    (1, "adamw_split_8bit", False), (3, "adamw_split", True), (3, "adamw_split_8bit", False), (1, "adamw_split_bf16", True),
])  # fmt: skip
def test_the_bits_of_gradients_that_stay(rank_pool, tmp_path, accumulation, optimizer, tied):
    ((seen, found),) = rank_pool(1).run(_both, str(tmp_path), accumulation, optimizer, tied)
    assert found == [(True, True, True)] * 3
    applied = [row[2] for row in seen if isinstance(row, tuple)]
    assert applied == [True, True, False, True, True, True, True, False, True]


def _left():
    """Of a run in which all leave: what is still on the parameters after each backward."""
    engine = _engine(2, "adamw_split", False, 1.0, Late())
    left = []
    for batch in share(rows(0, 4), 0, 1, 2):
        engine.backward(engine(**batch)["loss"])
        left.append(sum(p.grad is not None for p in engine._ds.module.parameters()))
    gradients, seen = engine._reduction.stream.gradients, engine._ds.optimizer.averaged_gradients
    owned = sum(gradients.owns(g) for group in seen.values() for g in group)
    engine.step()
    engine.close()
    return left, owned


def test_nothing_stays_on_the_parameters(rank_pool):
    ((left, owned),) = rank_pool(1).run(_left)
    assert left == [0, 0] and owned > 10


def _refused(change, spilled):
    cfg = config(2, bf16=True, micro=1, accumulation=2)
    cfg["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    cfg["data_types"] = {"grad_accum_dtype": "bf16"}
    optimizer = "adamw_split"
    if change == "stage":
        cfg["zero_optimization"]["stage"] = 3
    elif change == "offload":
        del cfg["zero_optimization"]["offload_optimizer"]
    elif change == "sums":
        cfg["data_types"] = {"grad_accum_dtype": "fp32"}
    elif change == "optimizer":
        optimizer = "adamw"
    try:
        Engine(TinyLM(), ds_config=cfg, optimizer=optimizer, offload_gradients=spilled, hang_s=None)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change, named", [
    ("stage", "stage 2"), ("offload", "offload_optimizer"), ("sums", "grad_accum_dtype"), ("optimizer", "adamw_split"),
])  # fmt: skip
def test_where_gradients_cannot_leave_it_is_said(rank_pool, change, named):
    (said,) = rank_pool(1).run(_refused, change, 0.5)
    assert named in said.split("missing here:")[1]


def test_a_share_is_from_0_to_1(rank_pool):
    (said,) = rank_pool(1).run(_refused, None, 1.5)
    assert "from 0 to 1" in said
