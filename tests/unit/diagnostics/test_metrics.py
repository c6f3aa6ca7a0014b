"""Numbers of a run: warm-up, spread, FLOPs, rows that survive."""

import errno
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigtrain.diagnostics import metrics
from bigtrain.diagnostics.metrics import (
    FlopsFormula,
    ProcessMemory,
    RowLog,
    StepClock,
    flops_formula,
    read_rows,
    spread,
    steady,
    summarise,
)
from bigtrain.errors import BigtrainError
from bigtrain.plan.cards import peak_bf16_flops


def row(step, step_time_s=0.05, loss=2.0, **more):
    return {
        "step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100, "step_time_s": step_time_s,
        "tokens_per_s": 100 / step_time_s, "gpu_allocated_bytes": 0, "gpu_reserved_bytes": 0, "host_rss_bytes": 2**30,
        "skipped": False, **more,
    }  # fmt: skip


def test_B71_the_first_steps_are_not_timed_and_that_is_said():
    summary = summarise([row(1, 2.0), row(2, 1.0), *(row(s) for s in range(3, 21))])
    assert summary["untimed_steps"] == 3
    assert summary["step_time_s"] == {"median": 0.05, "p10": 0.05, "p90": 0.05}
    assert summary["tokens_per_s"]["median"] == pytest.approx(2000)
    assert summary["train_time_s"] == pytest.approx(2 + 1 + 18 * 0.05)  # the total keeps every second


def test_a_resumed_run_tells_its_own_counts_from_those_of_all_starts():
    rows = [row(s) for s in range(1, 11)]
    summary = summarise(rows, {"saving": 3.0}, resumed_after=6)
    assert (summary["steps"], summary["tokens"], summary["train_time_s"]) == (10, 1000, pytest.approx(0.5))
    assert (summary["resumed_after_step"], summary["since_resume_steps"], summary["since_resume_tokens"]) == (6, 4, 400)
    assert summary["since_resume_train_time_s"] == pytest.approx(0.2) and summary["since_resume_saving_time_s"] == 3.0
    assert "saving_time_s" not in summary  # nobody knows what the other starts took
    alone = summarise(rows, {"saving": 3.0})
    assert alone["saving_time_s"] == 3.0 and not [name for name in alone if "resume" in name]


def test_B71_short_runs_leave_out_a_third():
    assert [len(steady(range(n))) for n in (1, 2, 3, 6, 9, 10)] == [1, 2, 2, 4, 6, 7]


def test_B71_evaluation_and_saving_are_listed_apart():
    clock_at = iter([0.0, 1.0, 5.0, 6.5, 7.0, 9.0]).__next__
    clock = StepClock(now=clock_at)  # 0.0
    with clock.paused("evaluation"):  # 1.0 to 5.0
        pass
    assert clock.lap() == 2.5  # 6.5 - 0.0 - 4.0
    with clock.paused("saving"):  # 7.0 to 9.0
        pass
    assert clock.totals_s == {"evaluation": 4.0, "saving": 2.0}


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50))
def test_spread_is_ordered(values):
    s = spread(values)
    assert min(values) <= s["p10"] <= s["median"] * (1 + 1e-12) and s["median"] <= s["p90"] * (1 + 1e-12) <= max(values) * (
        1 + 1e-9
    )


def test_B72_flops_of_a_known_shape():
    # One layer, hidden 4, sequence 8: 6 per weight and token, 6 x layers x sequence x hidden for causal attention.
    formula = FlopsFormula(trained_parameters=1000, layers=1, hidden=4, seq_len=8)
    assert formula.per_token == 6 * 1000 + 6 * 1 * 8 * 4
    assert "6 x 1,000 trained parameters" in str(formula) and "recomputation not counted" in str(formula)


@pytest.mark.parametrize(
    ("family", "values", "share"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, 2 / 8),
        ("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2}, 2 / 8),
        ("aria_text", {"moe_num_experts": 8, "moe_topk": 2}, 2 / 8),
        ("gemma4_text", {"num_experts": 8, "top_k_experts": 2}, 2 / 8),
        ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 2}, 2 / 8),
        ("llama", {}, 1.0),
    ],
)
def test_of_routed_experts_the_active_ones_count(family, values, share):
    """Whatever a family calls them: all were counted for Aria, one for Gemma 4."""
    import torch
    from transformers import AutoConfig

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = AutoConfig.for_model(family, **values)
            self.mlp = torch.nn.ModuleDict(
                {"experts": torch.nn.Linear(16, 8, bias=False), "gate": torch.nn.Linear(3, 1, bias=False)}
            )

    assert flops_formula(Block(), 8).trained_parameters == int(16 * 8 * share) + 3


def test_experts_in_modules_of_other_names_are_routed_too():
    """JetMoE's: a query goes through two of four, in attention and in the feed-forward part."""
    import torch
    from transformers import JetMoeConfig, JetMoeForCausalLM

    config = JetMoeConfig(
        vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_key_value_heads=2, kv_channels=4,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = JetMoeForCausalLM(config)
    feed_forward, attention = 4 * (24 * 8 + 8 * 12), 4 * (8 * 8 + 8 * 8) + 4 * 8 + 8  # attention's with their router and bias
    everything = sum(p.numel() for p in model.parameters())
    assert flops_formula(model, 8).trained_parameters == everything - (feed_forward + attention) // 2


def test_B72_flops_of_a_matmul_counted_by_torch():
    """2 m n k, forward plus two backward products, is the 6 per weight and token of the formula."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    layer = torch.nn.Linear(64, 32, bias=False)
    tokens = torch.randn(16, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(tokens).sum().backward()
    assert counter.get_total_flops() == 16 * FlopsFormula(trained_parameters=64 * 32).per_token


def test_B72_frozen_weights_need_no_weight_gradient():
    assert FlopsFormula(trained_parameters=0, frozen_parameters=10).per_token == 40


def test_B72_mfu_is_a_fraction_of_a_known_peak():
    formula = FlopsFormula(trained_parameters=3_212_749_824, layers=28, hidden=3072, seq_len=4096)
    assert formula.mfu(15_604, "NVIDIA H100 80GB HBM3") == pytest.approx(0.337, abs=0.001)  # measured beside 33.7 %
    assert formula.mfu(15_604, "Some Card 9000") is None and formula.mfu(1.0, None) is None


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA A10", 125e12), ("NVIDIA A10G", 70e12), ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12), ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA GH200 480GB", 989e12), ("Tesla V100", None),
        ("NVIDIA H20", 148e12),
    ],
)  # fmt: skip
def test_peaks_by_the_name_of_the_card(card, peak):
    assert peak_bf16_flops(card) == peak


def test_rows_are_on_disk_as_they_are_written(tmp_path):
    log = RowLog(tmp_path / "m.jsonl")
    log.write(row(1))
    assert [r["step"] for r in read_rows(tmp_path / "m.jsonl")] == [1]  # before close
    log.close()


def test_resume_drops_rows_after_the_checkpoint_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps(row(s)) + "\n" for s in range(1, 8)) + '{"step": 8, "lo')
    log = RowLog(path, keep_to_step=5)
    log.write(row(6, loss=9.0))
    log.close()
    assert [r["step"] for r in read_rows(path)] == [1, 2, 3, 4, 5, 6] and read_rows(path)[-1]["loss"] == 9.0


def test_a_new_run_starts_an_empty_file(tmp_path):
    (tmp_path / "m.jsonl").write_text(json.dumps(row(1)) + "\n")
    RowLog(tmp_path / "m.jsonl").close()
    assert read_rows(tmp_path / "m.jsonl") == []


def test_not_a_number_is_null_and_the_file_stays_json(tmp_path):
    log = RowLog(tmp_path / "m.jsonl")
    log.write(row(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    log.close()
    kept = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert kept["loss"] is None and kept["grad_norm"] is None and kept["skipped"] is True
    assert summarise([kept])["first_loss"] is None and summarise([kept])["skipped_steps"] == 1


def test_summary_of_nothing():
    assert summarise([]) == {"steps": 0}


def test_host_memory_grows_with_what_is_held():
    memory = ProcessMemory()
    before = memory.rss_bytes()
    held = bytearray(b"x") * (64 << 20)
    assert memory.rss_bytes() - before > 48 << 20 and len(held)
    assert 0 <= memory.pss_bytes() <= memory.rss_bytes() * 1.1


def test_pss_is_measured_again_only_after_200_times_its_cost(monkeypatch):
    calls, now = [], [0.0]

    def slow_reading():
        calls.append(now[0])
        now[0] += 0.1
        return len(calls)

    monkeypatch.setattr("bigtrain.diagnostics.metrics._read_pss_bytes", slow_reading)
    monkeypatch.setattr("bigtrain.diagnostics.metrics.time.monotonic", lambda: now[0])
    memory = ProcessMemory()
    assert [memory.pss_bytes(), memory.pss_bytes()] == [1, 1]
    now[0] = 20.05
    assert memory.pss_bytes() == 1
    now[0] = 20.15
    assert memory.pss_bytes() == 2


def test_a_damaged_line_costs_no_other_row(tmp_path):
    """A machine that crashed leaves zeros, or nonsense, where blocks had not reached the disk: rows after them were dropped."""
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n3\n{"step": "x"}\n{"step": 2}\n{"st')
    RowLog(path, keep_to_step=2).close()
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_rows_that_a_full_disk_does_not_take_are_held_for_a_while(tmp_path, monkeypatch, caplog):
    """The first of them ended the run, though somebody may free space, and a checkpoint that was not taken did not."""
    log = RowLog(tmp_path / "m.jsonl")
    log.write(row(1))
    disk, log._file = log._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    log.write(row(2))
    log.write(row(3))
    assert [r["step"] for r in log.rows()] == [1, 2, 3] and caplog.text.count(
        "takes no rows from step 2 on: No space left"
    ) == 1
    told = r"rows from step 2 .*m\.jsonl: .*No space left on device.*--resume_from_checkpoint auto"
    log.settle()  # at a run's end, whose outcome does not hang on it
    assert re.search(told, caplog.text) and [r["step"] for r in log.rows()] == [1, 2, 3]
    full, log._file = log._file, disk
    log.write(row(4))
    assert [r["step"] for r in read_rows(log.path)] == [1, 2, 3, 4] and "takes rows again" in caplog.text
    log._file = full
    log.write(row(5))
    monkeypatch.setattr(metrics, "HELD_S", -1.0)
    with pytest.raises(BigtrainError, match="rows from step 5"):
        log.write(row(6))
    log.close()


def test_a_row_that_the_system_will_never_take_is_told_at_once(tmp_path):
    log = RowLog(tmp_path / "m.jsonl")
    log._file = open(log.path, "rb", buffering=0)  # noqa: SIM115
    with pytest.raises(BigtrainError, match="rows from step 1 "):
        log.write(row(1))


def test_a_disk_that_is_full_before_the_first_row_is_told(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "m.jsonl.new").symlink_to("/dev/full")
    with pytest.raises(BigtrainError, match=r"m\.jsonl cannot be written: No space left on device"):
        RowLog(tmp_path / "m.jsonl", keep_to_step=1)


@pytest.mark.parametrize("how", ["removed", "moved"])
def test_rows_go_on_where_the_folder_was_taken_away(tmp_path, how, caplog):
    out = tmp_path / "out"
    out.mkdir()
    log = RowLog(out / "m.jsonl")
    log.write(row(1))
    if how == "removed":
        shutil.rmtree(out)
    else:
        out.rename(tmp_path / "elsewhere")
    log.write(row(2))
    log.write(row(3))
    log.close()
    assert [r["step"] for r in read_rows(out / "m.jsonl")] == [2, 3]
    assert caplog.text.count("was removed, moved or lost") == 1


def test_a_network_disk_that_fails_to_say_ends_no_run(tmp_path, monkeypatch, caplog):
    """What asked whether the file is there raised what it was answered; a stale handle is as good as a removed file."""

    def stale(*_told, **_more):
        raise OSError(errno.ESTALE, "Stale file handle")

    log = RowLog(tmp_path / "m.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(type(log.path), "stat", stale)
        log.write(row(1))
    assert not caplog.text
    monkeypatch.setattr(log, "_file", SimpleNamespace(write=stale, close=lambda: None))
    log.write(row(2))
    log.close()
    assert [r["step"] for r in read_rows(tmp_path / "m.jsonl")] == [1, 2] and "lost by its disk" in caplog.text
