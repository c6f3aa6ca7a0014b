"""Progress, trackers and the report, from the files that a run leaves."""

import json
import subprocess
import sys

import pytest

from bigtrain.diagnostics import report
from bigtrain.diagnostics.metrics import read_rows
from bigtrain.diagnostics.progress import Progress, Trackers, clock, loggable, open_trackers, status_line
from bigtrain.diagnostics.report import MAX_POINTS, flatten, headline, smooth, thin, write_report
from bigtrain.errors import UsageError
from tests.unit.diagnostics.test_metrics import row


@pytest.fixture
def run_folder(tmp_path):
    rows = [row(s, loss=8 - s / 20, host_rss_bytes=s * 2**28) for s in range(1, 61)]
    rows[10]["loss"], rows[10]["skipped"] = None, True
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"step": 60, "eval_loss": 5.25, "eval_tokens": 10}) + "\n")
    run = {
        "arguments": {"model_name_or_path": "preset:llama-tiny", "seed": 42}, "versions": {"torch": "2.13.0"},
        "decisions": [{"path": "train_batch_size", "value": 8, "source": "flag", "reason": "2 x 2 x 2 <ranks>"}],
        "world_size": 2, "device": "CPU", "engine": {"stage": 3, "dtypes": {"sums of micro steps": "fp32"}},
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "ds_config.resolved.json").write_text('{"zero_optimization": {"stage": 3}}')
    return tmp_path


def test_report_is_one_page_without_network(run_folder):
    page = write_report(run_folder).read_text()
    for part in (
        "preset:llama-tiny",
        "5.250",
        "torch",
        "2.13.0",
        "train_batch_size",
        "dtypes.sums of micro steps",
        "2 x 2 x 2 &lt;ranks&gt;",
        "<svg",
    ):
        assert part in page
    assert "<script" not in page and 'src="http' not in page and "@import" not in page
    assert (run_folder / "report.png").read_bytes().startswith(b"\x89PNG")


def test_report_of_a_killed_run_needs_only_the_metrics(run_folder):
    for name in ("run.json", "eval.jsonl", "ds_config.resolved.json"):
        (run_folder / name).unlink()
    assert write_report(run_folder).exists()


def test_report_of_one_step(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    assert write_report(tmp_path).exists()


def test_report_of_nothing(tmp_path):
    with pytest.raises(UsageError, match="nothing to report"):
        write_report(tmp_path)


def test_report_as_a_command(run_folder):
    done = subprocess.run(
        [sys.executable, "-m", "bigtrain.diagnostics.report", str(run_folder)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "report.html" in done.stdout


def test_runs_side_by_side(run_folder, tmp_path_factory, capsys):
    empty = tmp_path_factory.mktemp("empty")
    (empty / "run.json").write_text('{"outcome": "failed: OutOfMemoryError"}')
    assert report.main([str(run_folder), str(empty)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == f"| {run_folder.name} | 60 | 5.000 | 2,000 (2,000 to 2,000) |  |  | 15.00 |"
    assert "failed: OutOfMemoryError" in lines[3]
    assert report.main([str(empty)]) == 2
    assert report.main([str(run_folder), str(empty / "nowhere")]) == 2  # it "did not start"
    (empty / "file").touch()
    assert report.main([str(empty / "file")]) == 1 and f"{empty}/file" in capsys.readouterr().err  # a traceback
    for words, code in (([], 2), (["--help"], 0)):  # --help was taken for a folder
        with pytest.raises(SystemExit) as left:
            report.main(words)
        assert left.value.code == code


def test_thinning_keeps_the_spike():
    values = [1.0] * 20_000
    values[12_345] = 99.0
    steps, kept = thin(list(range(20_000)), values)
    assert len(kept) <= MAX_POINTS + 2 and max(kept) == 99.0 and steps == sorted(steps)


def test_smoothing_keeps_a_line_straight_and_starts_where_the_values_start():
    line = [float(i) for i in range(500)]
    assert smooth(line)[:400] == pytest.approx(line[:400])
    assert smooth([5.0])[0] == 5.0


def test_headline_and_readable_numbers(run_folder):
    from bigtrain.diagnostics.metrics import summarise

    summary = summarise(read_rows(run_folder / "metrics.jsonl"))
    cards = dict(headline(summary))
    assert cards["host memory, fullest rank"] == "15.00 GiB" and cards["loss, first to last"] == "7.950 → 5.000"
    assert dict(flatten({"peak_host_rss_bytes": 2**30, "steps": 1200, "x_s": 0.5}))["peak_host_rss"] == "1.00 GiB"
    assert flatten({"peak_gpu_used_bytes": 0, "peak_host_rss_bytes": 0}) == [("peak_host_rss", "0.00 GiB")]


def test_B38_nothing_asks_for_a_loss_scale(run_folder):
    assert not any("scale" in key for r in read_rows(run_folder / "metrics.jsonl") for key in r)
    assert "loss_scale" not in " ".join(loggable(row(1)))


def test_trackers(tmp_path):
    trackers = open_trackers(["tensorboard"], tmp_path, {"seed": 1})
    trackers.log(loggable(row(1)), 1)
    trackers.close()
    assert list((tmp_path / "runs").glob("events.*"))
    with pytest.raises(UsageError, match="expected one of"):
        open_trackers(["excel"], tmp_path, {})


def test_a_tracker_that_fails_is_let_go_of_and_the_others_go_on(caplog):
    class Remembers:
        def __init__(self, fails_at=0):
            self.fails_at, self.steps, self.closed = fails_at, [], False

        def log(self, numbers, step):
            if step == self.fails_at:
                raise ConnectionError("no route to the server")
            self.steps.append(step)

        def close(self):
            self.closed = True
            if self.fails_at < 0:
                raise OSError("disk full")

    kinds = {"mlflow": Remembers(fails_at=2), "wandb": Remembers(), "tensorboard": Remembers(fails_at=-1)}
    trackers = Trackers(kinds)
    for step in (1, 2, 3):
        trackers.log({"loss": 1.0}, step)
    trackers.close()
    assert [kind.steps for kind in kinds.values()] == [[1], [1, 2, 3], [1, 2, 3]]
    assert [kind.closed for kind in kinds.values()] == [False, True, True]
    assert [r.getMessage().split(";")[0] for r in caplog.records] == [
        "--report_to mlflow failed at step 2 and gets no more numbers",
        "--report_to tensorboard failed at its end and gets no more numbers",
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_tracker_that_is_not_installed(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=f"pip install {name}"):
        open_trackers([name], tmp_path, {})


def test_progress_lines_without_a_terminal(caplog):
    with caplog.at_level("INFO"):
        progress = Progress(total_steps=4, first_step=0, due=lambda step: step % 2 == 0, enabled=True)
        for step in range(1, 5):
            progress.step(row(step))
        progress.close()
    assert [line.split("  ")[0] for line in caplog.messages] == ["step 2/4", "step 4/4"]
    assert "loss 2.0000" in caplog.text and "ETA 0:00:00" in caplog.text


def test_one_slow_step_does_not_change_the_time_left(caplog):
    with caplog.at_level("INFO"):
        progress = Progress(total_steps=50, first_step=0, due=lambda step: True, enabled=True)
        for step, seconds in enumerate([30.0, 2.0, 2.0, 9.0, *[4.0] * 26], start=1):
            progress.step(row(step, step_time_s=seconds))
    left = [line.split("ETA ")[1] for line in caplog.messages]
    assert left[2:4] == ["0:01:34", "0:04:13"] and left[4] == "0:03:00" and left[-1] == "0:01:20"


def test_progress_is_silent_off_rank_0(caplog):
    with caplog.at_level("INFO"):
        Progress(total_steps=1, first_step=0, due=lambda step: True, enabled=False).step(row(1))
    assert caplog.messages == []


def test_status_line_says_what_is_wrong():
    assert status_line(row(1, loss=None, skipped=True)) | {} == {
        "loss": "not finite", "lr": "1.00e-03", "tok/s": "2,000", "host": "1.0 GiB", "skipped": "yes",
    }  # fmt: skip
    assert clock(3723) == "1:02:03"
