"""README's shell lines: cheap ones are run, dear ones name the test that runs them; paths and make targets exist."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, python_path

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


def test_files_and_modules_that_texts_name_exist():
    """Of every text of the project: code, pages, grids; a path from the top, or a dotted name down to what the module holds."""
    missing = set()
    for text in _texts():
        words = text.read_text(encoding="utf-8")
        paths = set(re.findall(r"(?<![\w/.-])(?:bigtrain|docs|ds_configs|launch|tests)/[\w./-]*\w\.[a-z]\w*", words))
        links = set(re.findall(r"\]\(([^)#:\s]+)\)", words)) if text.suffix == ".md" else set()
        missing |= {(str(text.relative_to(ROOT)), link) for link in links if not (text.parent / link).exists()}
        names = set(re.findall(r"(?<![\w/.-])bigtrain(?:\.[a-z_]\w*)+", words)) - NO_MODULES
        missing |= {
            (str(text.relative_to(ROOT)), path) for path in paths if path not in NO_FILES and not (ROOT / path).exists()
        }
        missing |= {(str(text.relative_to(ROOT)), name) for name in names if not _in_the_sources(name)}
    assert missing == set()


# Operators of torch, a file that holds the mark of a folder, and a name that a test asks for in vain.
NO_MODULES = {"bigtrain.adamw_split", "bigtrain.packed_attention.default", "bigtrain.json", "bigtrain.nothing"}
# One of a folder's files, and a file below a user's own folder for caches.
NO_FILES = {"launch/grids/FILE.yaml", "bigtrain/machine.json"}


def _texts():
    kinds = {".py", ".md", ".yaml", ".sh", ".sbatch", ".cfg", ".jinja", ".c", ".cpp"}
    for folder in ("bigtrain", "docs", "ds_configs", "launch", "tests"):
        yield from (path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in kinds)
    yield from (path for path in sorted(ROOT.iterdir()) if path.name == "Makefile" or path.suffix in kinds)


def _in_the_sources(name):
    place, words = ROOT, name.split(".")
    while words and (place / words[0]).is_dir():
        place /= words.pop(0)
    file = place / f"{words[0]}.py" if words and (place / f"{words[0]}.py").exists() else place / "__init__.py"
    words = words[1:] if file.name != "__init__.py" else words
    return file.exists() and (not words or re.search(rf"\b{words[0]}\b", file.read_text(encoding="utf-8")) is not None)


def test_flags_that_the_pages_name_exist():
    """Those of launch/train.py and of bigtrain's verbs as their parsers have them; the launchers' are listed."""
    from bigtrain import cli
    from bigtrain.run.arguments import make_parser

    known = set(make_parser()._option_string_actions)
    with contextlib.redirect_stdout(io.StringIO()) as helps:
        for verb in ("plan", "inspect", "export", "doctor", "bench", "config generate", "config lint", "config resolve"):
            with pytest.raises(SystemExit):
                cli.main([*verb.split(), "--help"])
    known |= set(re.findall(FLAG, helps.getvalue()))
    others = {"--num_gpus", "--num_accelerators", "--standalone", "--nproc_per_node", "--master_addr", "--master_port", "--hostfile",
              "--module", "--local_rank", "--max_restarts", "--nnodes", "--nodes", "--rdzv_backend", "--rdzv_endpoint", "--rdzv_conf",
              "--rdzv_id", "--no-deps", "--checksum", "--kill-on-bad-exit"}  # fmt: skip
    pages = ["README.md", "ds_configs/README.md", *(f"docs/{name}.md" for name in PAGES)]
    unknown = {page: set(re.findall(FLAG, (ROOT / page).read_text())) - known - others for page in pages}
    assert not any(unknown.values()), unknown


FLAG = r"(?<![\w-])--[a-z][\w-]*"
PAGES = ("memory", "errors", "own_loop", "several_hosts", "performance")


def test_the_first_screen_of_the_readme_has_the_first_command():
    """With what it does for the reader; the whole is for a few screens more, and details stand in docs/."""
    lines = README.splitlines()
    assert lines.index("make train") < 20 and max(map(len, lines[:14])) <= 120 and len(lines) < 240


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
