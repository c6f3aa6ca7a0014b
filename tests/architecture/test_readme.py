"""README's shell lines: cheap ones are run, dear ones name the test that runs them; paths and make targets exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import python_path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n)?```sh\n(?P<lines>.*?)```", re.DOTALL)
BLOCKS = [(m["mark"], m["lines"]) for m in BLOCK.finditer(README)]


def test_every_shell_block_is_run_or_covered():
    for mark, lines in BLOCKS:
        assert mark, f"no mark above:\n{lines}"
        if mark == "test: run":
            continue
        file, test = mark.removeprefix("covered by: ").split("::")
        assert f"def {test}(" in (ROOT / file).read_text(), mark


@pytest.mark.parametrize("lines", [lines for mark, lines in BLOCKS if mark == "test: run"])
def test_shell_block_runs(lines, tmp_path):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "bigtrain").write_text(f'#!/bin/sh\nexec {sys.executable} -m bigtrain "$@"\n')
    (bin_folder / "bigtrain").chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": python_path(), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_that_the_readme_names_exist():
    named = re.findall(r"\]\(([^)#:]+)\)", README) + re.findall(r"\b(?:ds_configs|launch)/[\w./]+\.\w+", README)
    assert [n for n in named if not (ROOT / n).exists()] == []


def test_flags_that_the_readme_names_exist():
    from bigtrain.run.arguments import make_parser

    known = set(make_parser()._option_string_actions)
    others = {"--num_gpus", "--num_accelerators", "--standalone", "--nproc_per_node", "--master_port", "--hostfile",
              "--include", "--gpus", "--max_restarts", "--no",  # pip's --no-deps
              "--gpu_memory", "--host_memory", "--auto", "--measure",
              "--dtype", "--stage", "--offload", "--world_size", "--model", "--local_rank"}  # fmt: skip
    assert set(re.findall(r"--[a-z]\w+", README)) - known - others == set()


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", README + makefile):
        assert f"\n{target}:" in makefile, target
    for target in ("train", "test", "lint"):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_table_of_metrics_is_the_row_that_is_written():
    from tests.ranks.test_train import ROW

    assert f"`{' '.join(ROW)}`" in README
