"""From logs and metrics to a row: what became of a cell, time, speed, memory."""

import pytest

from bigtrain.bench import result
from bigtrain.bench.processes import Ended
from bigtrain.diagnostics.metrics import FlopsFormula

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "codes, timed_out, text, done, status",
    [
        ([0, 0], False, "", 8, "ok"),
        ([0, 0], False, "", 7, "crash"),  # ended well, but not all steps are there
        ([1, None], False, OOM, 3, "oom"),
        ([3, 3], False, "DoesNotFitError: ...", 0, "refused"),
        ([3, 1], False, OOM, 2, "oom"),  # whatever it exits with: memory ran out in a step
        ([2], False, "UsageError: ...", 0, "usage"),
        ([-9, None], False, "", 4, "killed"),
        ([-6, 1], False, "terminate called", 4, "crash"),
        ([None, None], True, "", 4, "timeout"),
    ],
)
def test_classify(codes, timed_out, text, done, status):
    assert result.classify(Ended(codes, timed_out), text, done, 8) == status


def test_error_line_is_the_exception_not_the_last_words():
    log = "Traceback ...\n  File x\nValueError: first\n\nDuring handling ...\n[rank0]: RuntimeError: second\nwarning: leaked\n"
    assert result.error_line(log) == "RuntimeError: second"
    listed = "rank 0: CPU\nUsageError: 1 problem(s) in the arguments:\n  - train_data: d does not exist\nbye\n"
    assert result.error_line(listed) == "UsageError: 1 problem(s) in the arguments: - train_data: d does not exist"
    assert result.error_line("Killed\n\n") == "Killed" and result.error_line("") == ""


def test_the_rank_that_failed_by_itself_is_quoted(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "rank0.log").write_text("RanksDisagreeError: rank 1 failed\n")
    (tmp_path / "rank1.log").write_text("KeyError: 'x'\n")
    status, error, rows = result.read_cell(tmp_path / "out", Ended([1, 1]), 8, "max_cell_s 9")
    assert (status, error, rows) == ("crash", "KeyError: 'x'", [[]])


@pytest.mark.parametrize(
    "done, limit, said",
    [
        (0, "max_cell_s 90", "0 of 8 steps in 91 s: max_cell_s 90 was over before the end of the first, which builds and tunes kernels "
         "(minutes, with experts); give a larger --max_cell_s"),
        (3, "--total_s 600", "3 of 8 steps in 91 s: --total_s 600 was over; the same command runs it again"),
    ],
)  # fmt: skip
def test_a_cell_out_of_time_says_which_limit_and_what_to_do(tmp_path, done, limit, said):
    (tmp_path / "out").mkdir()
    rows = "".join(f'{{"step": {n}, "loss": 1.0, "step_time_s": 1.0, "tokens": 8}}\n' for n in range(done))
    (tmp_path / "out" / "metrics.jsonl").write_text(rows)
    # a warning of a library is not why a cell was late
    (tmp_path / "rank0.log").write_text("backend x: ImportError: no tanh\nmodel FLOPs per token: 6 N\n\n")
    status, error, _ = result.read_cell(tmp_path / "out", Ended([None], timed_out=True, seconds=91.2), 8, limit)
    assert (status, error) == ("timeout", f"{said}; last words: model FLOPs per token: 6 N")


def row(step, seconds):
    return {"step": step, "loss": 7.0 - step, "step_time_s": seconds, "tokens": 100}


def test_B71_the_first_steps_are_not_timed_and_that_is_said():
    """First step 2 s, others 50 ms: median and quartiles are those of the steady steps, and the row says what was left out."""
    rows = [row(1, 2.0), *(row(s, 0.05) for s in range(2, 9))]
    found = result.timing(rows, 3)
    assert found["step_time_s"] == {"median": 0.05, "q1": 0.05, "q3": 0.05, "n": 5}
    assert found["untimed_steps"] == 3 and found["first_step_s"] == 2.0
    assert (found["first_loss"], found["last_loss"]) == (6.0, -1.0)
    assert result.timing(rows[:3], 3) == {}


def test_quartiles():
    assert result.quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}
    assert result.quartiles([4.0]) == {"median": 4.0, "q1": 4.0, "q3": 4.0, "n": 1}


def test_B72_flops_in_their_unit_and_without_recompute():
    """1e9 parameters, 1e5 tokens/s: 6e14 FLOP/s are 600 TFLOP/s, and 60.67 % of an H100's 989."""
    formula = FlopsFormula(trained_parameters=10**9)
    found = result.speed(0.5, 100_000, 2, formula, "NVIDIA H100 80GB HBM3")
    assert found["tokens_per_s_per_gpu"] == 100_000 and found["model_tflops"] == pytest.approx(600, rel=1e-12)
    assert found["mfu"] == pytest.approx(6e14 / 989e12, rel=1e-12) and "note" not in found
    assert "recomputation not counted" in found["formula"] and "9.89e+14 FLOP/s" in found["formula"]
    assert "above 1" in result.speed(0.1, 100_000, 1, formula, "NVIDIA H100 80GB HBM3")["note"]
    assert result.speed(0.5, 100, 1, None, "CPU")["mfu"] is None


def test_memory_takes_the_fullest_of_all_ranks_and_both_ways_of_looking():
    ended = Ended([0, 0], rss_bytes={0: 50, 1: 70}, pss_bytes={0: 40, 1: 30}, node_pss_bytes=65, gpu_used_bytes=900,
                  gpu_used_before_bytes=4)  # fmt: skip
    rows = [[{"gpu_allocated_bytes": 5, "gpu_reserved_bytes": 6, "gpu_used_bytes": 800, "host_rss_bytes": 60,
              "gpu_alloc_retries": 9}, {"gpu_alloc_retries": 2}],
            [{"gpu_allocated_bytes": 7, "gpu_reserved_bytes": 6, "gpu_used_bytes": 850}]]  # fmt: skip
    assert result.memory(rows, ended) == {
        "gpu_allocated_bytes": 7, "gpu_reserved_bytes": 6, "gpu_used_bytes": 900, "host_rss_bytes": 70, "host_pss_bytes": 40,
        "host_node_pss_bytes": 65, "gpu_alloc_retries": 2,
    }  # fmt: skip
    assert result.memory([[]], Ended([0]))["gpu_used_bytes"] is None


def test_errors_only_where_both_are_known():
    said = {"gpu_allocated_bytes": 110, "gpu_used_bytes": 50, "host_bytes": 90, "step_time_s": 2.0}
    seen = {"gpu_allocated_bytes": 100, "gpu_used_bytes": None, "host_pss_bytes": 100, "step_time_s": {"median": 4.0}}
    found = result.errors(said, seen)
    assert found == {"gpu_allocated_bytes": pytest.approx(0.1), "host_bytes": pytest.approx(-0.1), "step_time_s": -0.5}
    assert result.errors({"none": "no formulas"}, seen) == {}
