"""Data on real ranks: one tokenisation, equal steps, the same global batches, failures on all ranks alike."""

from __future__ import annotations

import json

import pytest
import torch

from bigtrain import ranks
from bigtrain.data.loader import EvalLoader, StepLoader
from bigtrain.data.order import SampleOrder, plan_eval, plan_steps
from bigtrain.data.pack import build_rows
from bigtrain.data.source import load_source
from bigtrain.errors import DataError, RanksDisagreeError


def _ids_rows(lengths, seq_len, cache_dir, packing="none"):
    from datasets import Dataset

    documents = [[100 * (i + 1) + k for k in range(length)] for i, length in enumerate(lengths)]
    source = Dataset.from_dict({"input_ids": documents})
    return build_rows(source, None, seq_len, packing, cache_dir=cache_dir, main_first=ranks.main_first("tokenising"))


def _train(lengths, seq_len, micro, accumulation, cache_dir, start_step, epochs):
    """What each rank sees: per step and micro step the sample numbers, and the step's targets over all ranks."""
    rows = _ids_rows(lengths, seq_len, cache_dir)
    plan = plan_steps(len(rows), micro, accumulation, ranks.world_size(), epochs)
    ranks.agree((len(rows), plan.steps, rows.stats.target_tokens), "rows, steps and targets")
    loader = StepLoader(rows, SampleOrder(len(rows), 1), plan, ranks.rank(), ranks.world_size(), start_step)
    seen = []
    for micro_batches in loader:
        targets = sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)
        samples = [(batch["input_ids"][:, 0] // 100 - 1).tolist() for batch in micro_batches]
        seen.append((samples, ranks.sum_across(targets)))  # a collective per step: uneven steps would hang here
    return seen


def _global(results, accumulation):
    """[(samples in training order, targets)] per step from the ranks' views."""
    steps = []
    for views in zip(*results):
        assert len({targets for _, targets in views}) == 1
        samples = [s for a in range(accumulation) for view, _ in views for s in view[a]]
        steps.append((samples, views[0][1]))
    return steps


@pytest.mark.parametrize(("micro", "world", "accumulation"), [(4, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2)])
def test_B56_counts_and_rows_of_a_global_batch_do_not_depend_on_the_split(rank_pool, tmp_path, micro, world, accumulation):
    """Sequences with 2, 9, 3 and 14 real tokens have 1 + 8 + 2 + 13 = 24 targets, however they are split."""
    lengths = [2, 9, 3, 14]
    results = rank_pool(world).run(_train, lengths, 16, micro, accumulation, str(tmp_path), 0, 2)
    steps = _global(results, accumulation)
    order = SampleOrder(4, 1)
    assert steps == [([order.row(p) for p in range(s * 4, s * 4 + 4)], 24) for s in range(2)]


@pytest.mark.parametrize("world", [2, 3])
def test_B48_nine_samples_end_on_all_ranks_at_the_same_step(rank_pool, tmp_path, world):
    for accumulation in (1, 2):
        results = rank_pool(world).run(_train, [4] * 9, 4, 1, accumulation, str(tmp_path), 0, 1)
        steps = _global(results, accumulation)
        assert len(steps) == -(-9 // (world * accumulation))
        samples = [s for chosen, _ in steps for s in chosen]
        assert sorted(samples[:9]) == list(range(9))


def test_resume_on_other_ranks_continues_the_global_order(rank_pool, tmp_path):
    whole = _global(rank_pool(2).run(_train, [4] * 10, 4, 2, 1, str(tmp_path), 0, 3), 1)
    assert _global(rank_pool(1).run(_train, [4] * 10, 4, 1, 4, str(tmp_path), 3, 3), 4) == whole[3:]
    assert _global(rank_pool(2).run(_train, [4] * 10, 4, 1, 2, str(tmp_path), 5, 3), 2) == whole[5:]


def _refusal(n, micro, accumulation, cache_dir):
    try:
        _train([4] * n, 4, micro, accumulation, cache_dir, 0, 1)
    except DataError as error:
        return str(error)
    return "trained"


def test_B61_too_little_data_is_the_same_error_on_every_rank(rank_pool, tmp_path):
    messages = rank_pool(2).run(_refusal, 3, 1, 2, str(tmp_path))
    assert len(set(messages)) == 1
    assert "3 rows, but a step takes 4 = 1 (micro batch) x 2 (accumulation) x 2 (ranks)" in messages[0]
    assert rank_pool(2).run(_refusal, 0, 1, 2, str(tmp_path)) == ["the data set holds 0 samples"] * 2


def _evaluate(lengths, cache_dir):
    rows = _ids_rows(lengths, 8, cache_dir)
    world = ranks.world_size()
    targets = batches = 0
    for batch in EvalLoader(rows, plan_eval(len(rows), 2, world), ranks.rank(), world):
        targets += int(ranks.sum_across(int((batch["labels"] != -100).sum())))
        batches += 1
    return batches, targets


@pytest.mark.parametrize("world", [1, 2, 3])
def test_B48_evaluation_runs_equally_often_and_counts_exactly(rank_pool, tmp_path, world):
    lengths = [2, 5, 3, 8, 4]
    assert rank_pool(world).run(_evaluate, lengths, str(tmp_path)) == [(-(-5 // (2 * world)), 17)] * world


def _tokenise_text(path, tokenizer_dir, cache_dir):
    from transformers import AutoTokenizer

    import bigtrain.data.tokenise as module

    calls = []
    inner = module.text_encoder

    def counted(*args):
        encode = inner(*args)

        def counting(batch, samples):
            calls.append(len(samples))
            return encode(batch, samples)

        return counting

    module.text_encoder = counted
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
        rows = build_rows(
            load_source(path, cache_dir=cache_dir + "/hf"),
            tokenizer,
            32,
            cache_dir=cache_dir,
            main_first=ranks.main_first("tokenising"),
        )
    finally:
        module.text_encoder = inner
    digest = torch.stack([rows[i]["input_ids"] for i in range(len(rows))]).sum().item()
    return sum(calls), len(rows), digest


def test_one_rank_of_a_node_tokenises_and_the_others_read_its_file(rank_pool, tmp_path):
    from bigtrain.data.demo import train_tokenizer

    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {i} of the text"}) + "\n" for i in range(300)))
    train_tokenizer(path, tmp_path / "tokenizer", 300)
    first, second = rank_pool(2).run(_tokenise_text, str(path), str(tmp_path / "tokenizer"), str(tmp_path / "cache"))
    assert first[0] == 300 and second[0] == 0
    assert first[1:] == second[1:]


def _rows_of(folder, of_rank):
    """`load_rows` of a path that each rank sees other files under."""
    from bigtrain.data.sets import load_rows

    try:
        return load_rows(f"{folder}/{of_rank[ranks.rank()]}.jsonl", None, None, 1, None, 16, "isolated", None)[0].content
    except (DataError, RanksDisagreeError) as error:
        return f"{type(error).__name__}: {error}"


def test_ranks_that_see_other_data_are_told_so_before_anything_is_built(rank_pool, tmp_path):
    """Also where rows and tokens are as many, and where a single rank cannot read what it sees."""
    for name, rows in {"a": [[1, 2], [3]], "b": [[2, 1], [3]], "c": [[1, 2], [0.5]]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    load = rank_pool(2).run
    first, second = load(_rows_of, str(tmp_path), "aa")
    assert first == second and len(first) == 32
    for said in load(_rows_of, str(tmp_path), "ab"):
        assert said.startswith(
            "RanksDisagreeError: the training data differs between ranks:\n  rank 0: {'hash of all tokens': "
        )
    for of_rank in ("ac", "ca"):
        said = load(_rows_of, str(tmp_path), of_rank)
        alone = of_rank.index("c")
        assert (
            said[alone].startswith("DataError: training data: ")
            and "c.jsonl line 2: sample 1: 'input_ids' must be" in said[alone]
        )
        assert f"failed on 1 of 2 ranks:\n  rank {alone}: DataError" in said[1 - alone]
