"""The files made from rows: CSV, picture, page; and the numbers in them."""

import csv

from bigtrain.bench import pareto, report

GIB = 2**30


def row(number, status="ok", runner="bigtrain", speed=100.0, used=10 * GIB, said=11 * GIB, fits=True):
    base = {
        "cell": f"c{number}", "label": f"cell {number}", "runner": runner, "model": "preset:llama-1b", "num_gpus": 1,
        "card": "H100",
        "code": "abc", "status": status, "settings": {"seq_len": 4096, "optim": f"o{number}"}, "error": "",
        "predicted": {"gpu_used_bytes": said, "fits": fits, "tokens_per_s_per_gpu": 120.0},
        "predicted_at": "t", "versions": {"torch": "2"},
    }  # fmt: skip
    if status != "ok":
        return {**base, "error": "CUDA out of memory <here>"}
    return {
        **base, "step_time_s": {"median": 1.0, "q1": 0.9, "q3": 1.1, "n": 5}, "tokens_per_s_per_gpu": speed, "mfu": 0.4,
        "model_tflops": 395.6, "formula": "6 x N", "gpu_used_bytes": used,
        "prediction_error": {"gpu_used_bytes": said / used - 1},
    }  # fmt: skip


ROWS = [row(1), row(2, speed=50, used=20 * GIB), row(3, "oom"), row(4, runner="hf_trainer", speed=200, used=30 * GIB)]


def test_front_is_what_nothing_beats_in_both():
    assert pareto.front([(10, 100), (20, 50), (30, 200), (10, 90), (30, 150)]) == [0, 2]
    assert pareto.front([]) == []


def test_all_files_are_written_and_the_page_stands_alone(tmp_path):
    page = report.write(tmp_path, ROWS).read_text()
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in page
    assert not [sign for sign in ("<script", "src=", 'href="http', "url(http", "@import") if sign in page]
    assert "6 x N" in page and "&lt;here&gt;" in page and "ran out of memory: cell 3" in page
    table = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert [t["status"] for t in table] == ["ok", "ok", "oom", "ok"] and table[0]["step_time_s_median"] == "1.0"
    assert table[0]["predicted.gpu_used_bytes"] == str(11 * GIB) and table[2]["tokens_per_s_per_gpu"] == ""


def test_accuracy_and_broken_promises():
    (found,) = report.accuracy(ROWS)
    assert found["cells"] == 3 and found["where"] == "cell 4" and abs(found["worst"] - 19 / 30) < 1e-9
    assert abs(found["mean"] - (0.1 + 9 / 20 + 19 / 30) / 3) < 1e-9
    assert [r["label"] for r in report.broken_promises(ROWS)] == ["cell 3"]
    assert report.broken_promises([row(3, "oom", fits=False)]) == []


def test_a_sweep_where_nothing_ran_has_a_report_too(tmp_path):
    assert report.write(tmp_path, [row(1, "oom")]).exists()
