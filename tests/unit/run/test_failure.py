"""What is said of versions that nobody tested: before a run, and beside a failure that nobody expected."""

import configparser
import os
import re
import resource
from types import SimpleNamespace

import pytest

from bigtrain.diagnostics.doctor import examine, versions
from bigtrain.errors import UsageError
from bigtrain.run import failure
from bigtrain.train import Run
from tests import ROOT

NEWER = "this version of torch is newer than the tested ones (2.99.0; needed: {} to {}). To mend it: pip install 'torch=={}'"


@pytest.fixture
def newer(monkeypatch):
    found = {"python": "3.11.7", "torch": "2.99.0", "deepspeed": "0.20.0", "bitsandbytes": None}
    monkeypatch.setattr(versions, "measure_packages", lambda driver=None: versions.Versions(found=found))
    torch = next(t for t in versions.TESTED if t.package == "torch")
    return f"version of torch: {NEWER.format(torch.lowest, torch.highest, torch.highest)}"


def test_untested_versions_are_named_beside_a_failure_that_nobody_expected(newer, capsys):
    assert failure.report(AttributeError("gone")) == 1
    story = capsys.readouterr().err
    assert f"AttributeError: gone\n{newer}\nversion of deepspeed: " in story
    assert "bitsandbytes" not in story and "version of python" not in story


def test_a_package_that_is_missing_is_said_with_how_to_get_it(capsys):
    """matplotlib was missed in a traceback, once the run was done and its report was due."""
    assert failure.report(ModuleNotFoundError("No module named 'nowhere.at'", name="nowhere.at")) == 1
    assert capsys.readouterr().err.startswith("BigtrainError: the package nowhere is not installed; run: pip install nowhere ")
    assert failure.report(ModuleNotFoundError("No module named 'json.nowhere'", name="json.nowhere")) == 1
    assert "is not installed" not in capsys.readouterr().err  # a fault of somebody's code: json is there


def test_untested_versions_are_said_before_a_run(newer, tmp_path):
    found = {f.name: f for f in examine.preflight(str(tmp_path), 1, {"PATH": ""})}
    assert (found["version of torch"].status, found["version of torch"].line()) == ("warning", newer)
    assert found["version of deepspeed"].status == "broken"  # its internals are used


def test_nothing_is_said_of_tested_versions(tmp_path):
    assert failure.untested() == []
    assert not any(f.name.startswith("version") for f in examine.preflight(str(tmp_path), 1, {"PATH": ""}))


@pytest.mark.parametrize(
    ("version", "status"), [("3.10.13", "broken"), ("3.11.7", "ok"), ("3.12.1", "ok"), ("3.13.0", "ok"), ("3.99.0", "warning")]
)
def test_pythons(version, status):
    assert versions.check_python(version).status == status


def test_the_tested_pythons_are_those_that_the_package_names():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    named = re.findall(r"Python :: (3\.\d+)$", metadata["metadata"]["classifiers"], re.MULTILINE)
    assert tuple(named) == versions.TESTED_PYTHON
    assert metadata["options"]["python_requires"] == f">={versions.TESTED_PYTHON[0]}"


def test_a_limit_on_open_files_hides_no_failure(capsys):
    """Looking for versions opens files: the story of what failed was never printed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        assert failure.report(AttributeError("gone")) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "AttributeError: gone" in capsys.readouterr().err


@pytest.mark.parametrize(("start", "code"), [(0, 1), (4, 2)])
def test_exit_code_2_says_that_nothing_was_trained(start, code, capsys):
    """A disk that took no model after the last step, or data that was gone on the way, ended a run with it."""
    run = object.__new__(Run)
    run.engine = SimpleNamespace(global_step=4, checkpoints=SimpleNamespace(failure=lambda: None))
    run.start, run.main = start, False
    error = UsageError("out/model cannot be made: Input/output error")
    run.failed(error)
    assert failure.report(error) == code
