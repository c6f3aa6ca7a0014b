"""Which files a path means: nothing that is there is left out in silence, nothing is read twice unsaid."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest

from bigtrain.data.files import choose, expand, shared
from bigtrain.data.source import load_source
from bigtrain.errors import DataError


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"text": name}))


def names(folder, files):
    return [str(file.relative_to(folder)) for file in files]


def test_links_to_folders_are_followed_once(tmp_path):
    put(tmp_path, "real/a.jsonl", "data/b.jsonl")
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "back").symlink_to(tmp_path / "data")  # a loop
    assert names(tmp_path, expand(str(tmp_path / "data"))) == ["data/b.jsonl", "data/link/a.jsonl"]


def test_a_link_to_nothing_and_a_pipe_are_refused(tmp_path):
    put(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    for path in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b.jsonl"):
        with pytest.raises(DataError, match=r"b.jsonl is a link to nothing"):
            expand(str(path))
    (tmp_path / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b.jsonl is a pipe"):
        expand(str(tmp_path))


def test_a_pattern_that_matches_folders_means_their_files(tmp_path):
    put(tmp_path, "x/a.jsonl", "x/y/b.jsonl", "c.jsonl", "x/.hidden/d.jsonl")
    for pattern in ("*", "**", "**/*.jsonl"):
        assert names(tmp_path, expand(str(tmp_path / pattern))) == ["c.jsonl", "x/a.jsonl", "x/y/b.jsonl"]


def test_one_file_of_two_names_is_told(tmp_path, caplog):
    put(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert load_source(tmp_path)["text"][:] == ["a.jsonl", "a.jsonl"]
    assert "are one file, whose samples are therefore there twice" in caplog.text and "both read" not in caplog.text
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "z"}'))
    load_source(tmp_path)
    assert "a.jsonl.gz are both read: if one is the other compressed" in caplog.text


def test_files_whose_names_say_no_split_are_told(tmp_path, caplog):
    put(tmp_path, "train-0.jsonl", "train-1.jsonl", "stories.jsonl", "test.jsonl")
    assert names(tmp_path, choose([str(tmp_path)], "train")[1]) == ["train-0.jsonl", "train-1.jsonl"]
    assert "not read, because their names say no split" in caplog.text and "stories.jsonl" in caplog.text


def test_the_test_files_are_evaluated_on_only_where_there_is_no_validation(tmp_path):
    put(tmp_path, "train.jsonl", "test.jsonl")
    assert names(tmp_path, choose([str(tmp_path)], "validation")[1]) == ["test.jsonl"]
    put(tmp_path, "dev.jsonl", "validation.jsonl")
    assert names(tmp_path, choose([str(tmp_path)], "validation")[1]) == ["dev.jsonl", "validation.jsonl"]


@pytest.mark.parametrize("name", ["a.zip", "a.docx", "a.jsonl.zip", "a.tar.gz", "a.pdf", "a.txt", "a"])
def test_archives_are_not_read_as_text(tmp_path, name):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("b.txt", "hidden")
    with pytest.raises(DataError, match="archives and office documents are not read"):
        load_source(tmp_path / name)


def test_tables_are_refused_however_they_are_named(tmp_path):
    put(tmp_path, "a.csv", "b.tsv.gz")
    for path in ("a.csv", "b.tsv.gz", "*.csv", "."):
        with pytest.raises(DataError, match="write tables as JSON Lines or Parquet"):
            load_source(str(tmp_path / path))


def test_the_command_for_a_table_makes_what_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tsv").write_text('n\ttext\n1\t"NA, ""007"""\n2\t\u00e4\n')
    with pytest.raises(DataError) as refused:
        load_source("a.tsv")
    code = re.search(r'python -c "(.*)"', str(refused.value))[1]
    subprocess.run([sys.executable, "-c", code], check=True)
    assert load_source("train.jsonl")["text"][:] == ['NA, "007"', "\u00e4"]


def test_files_that_are_trained_and_evaluated_on_are_found(tmp_path):
    put(tmp_path, "train.jsonl", "test.jsonl", "other/a.jsonl")
    (tmp_path / "other" / "b.jsonl").symlink_to(tmp_path / "test.jsonl")
    assert shared(str(tmp_path), str(tmp_path)) == []  # the split that the names tell
    assert shared(str(tmp_path / "*.jsonl"), str(tmp_path / "other")) == []
    assert shared(str(tmp_path / "test.jsonl"), str(tmp_path / "other")) == [str(tmp_path / "other" / "b.jsonl")]
