"""Every kind of source, and what is said when there is none."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import shutil

import pytest
from datasets import Dataset, DatasetDict, Features, Sequence, Value

from bigtrain.data import jsonfile
from bigtrain.data.source import load_source, refuse_cache, sample_kind, split_validation
from bigtrain.data.tokenise import tokenise
from bigtrain.errors import DataError

_IDS = Features(input_ids=Sequence(Value("int64")))


def _jsonl(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_one_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert load_source(tmp_path / "a.txt")["text"][:] == ["one\n\ntwo\n"]
    assert load_source(tmp_path / "a.txt", text_unit="line")["text"][:] == ["one", "", "two"]
    assert len(load_source(tmp_path / "a.txt", text_unit="paragraph")) == 2


def test_folder_of_text_files_in_name_order(tmp_path, caplog):
    (tmp_path / "sub").mkdir()
    for name, text in {"b.py": "b", "a.txt": "a", "sub/c.md": "c", ".hidden.txt": "h", "x.bin": "x"}.items():
        (tmp_path / name).write_text(text)
    assert load_source(tmp_path)["text"][:] == ["a", "b", "c"]
    assert "{'.bin': 1}" in caplog.text
    assert load_source(str(tmp_path / "*.py"))["text"][:] == ["b"]
    assert load_source([tmp_path / "b.py", tmp_path / "a.txt"])["text"][:] == ["b", "a"]
    assert load_source(tmp_path / "x.bin")["text"][:] == ["x"]  # named itself


def test_changed_files_are_read_anew(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("old")
    assert load_source(file)["text"][:] == ["old"]
    file.write_text("new")
    os.utime(file, ns=(1, 1))
    assert load_source(file)["text"][:] == ["new"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_replaced_by_one_of_the_same_age_is_read_anew(tmp_path, name):
    """As from an archive, or by `cp -p`: the library's own cache asks for the time of writing alone."""

    def write(text):
        if name == "a.parquet":
            Dataset.from_dict({"text": [text]}).to_parquet(str(tmp_path / name))
        else:
            (tmp_path / name).write_text(text if name == "a.txt" else json.dumps({"text": text}))
        os.utime(tmp_path / name, ns=(1, 1))

    write("old")
    old = load_source(tmp_path / name)
    assert old["text"][:] == ["old"] and load_source(tmp_path / name)._fingerprint == old._fingerprint
    write("new")
    new = load_source(tmp_path / name)
    assert new["text"][:] == ["new"] and new._fingerprint != old._fingerprint


def test_a_part_of_a_saved_data_set_that_is_replaced_is_another_data_set(tmp_path):
    for name in ("one", "two"):
        Dataset.from_dict({"text": [name]}).save_to_disk(str(tmp_path / name))
    first = load_source(tmp_path / "one")
    shutil.copy2(next((tmp_path / "two").glob("data-*")), next((tmp_path / "one").glob("data-*")))
    second = load_source(tmp_path / "one")
    assert second["text"][:] == ["two"] and second._fingerprint != first._fingerprint
    next((tmp_path / "one").glob("data-*")).write_bytes(b"cut")
    with pytest.raises(DataError, match="cannot read the saved data set"):
        load_source(tmp_path / "one")


def test_a_data_set_saved_with_a_format_gives_plain_values(tmp_path):
    Dataset.from_dict({"input_ids": [[1, 2]]}).with_format("torch").save_to_disk(str(tmp_path / "one"))
    assert load_source(tmp_path / "one")[0] == {"input_ids": [1, 2]}


def test_parquet_shards_without_rows_with_more_columns_and_damaged(tmp_path):
    for name, columns in (("a", {"text": ["a"], "n": [1]}), ("b", {"text": []}), ("c", {"m": ["x"], "text": ["c"]})):
        Dataset.from_dict(columns, features=None if columns["text"] else Features(text=Value("string"))).to_parquet(
            str(tmp_path / f"{name}.parquet")
        )
    assert load_source(tmp_path)[:] == {"text": ["a", "c"]}
    with pytest.raises(DataError, match="holds 0 samples"):
        load_source(tmp_path / "b.parquet")
    (tmp_path / "d.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"d.parquet: Parquet file size is 0 bytes. It is damaged, or .* get or write it anew"):
        load_source(tmp_path)
    Dataset.from_dict({"body": ["d"]}).to_parquet(str(tmp_path / "d.parquet"))
    with pytest.raises(DataError, match=r"d.parquet has no column 'text', which other files have"):
        load_source(tmp_path)


def test_a_file_that_is_still_written_is_refused(tmp_path, monkeypatch):
    _jsonl(tmp_path / "a.jsonl", ["a"])
    read = jsonfile.read

    def and_then_more(*args):
        dataset = read(*args)
        with (tmp_path / "a.jsonl").open("a") as file:
            file.write('{"text": "b"}\n')
        return dataset

    monkeypatch.setattr(jsonfile, "read", and_then_more)
    with pytest.raises(DataError, match="changed while being read"):
        load_source(tmp_path / "a.jsonl")
    monkeypatch.undo()
    assert load_source(tmp_path / "a.jsonl", cache_dir=tmp_path / ".cache")["text"][:] == ["a", "b"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    _jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "no").write_text("a file where a folder should be")
    for name in ("a.jsonl", "b.txt"):
        with pytest.raises(DataError, match=r"cache of data .*no/bigtrain cannot be written: .* Set HF_DATASETS_CACHE"):
            load_source(tmp_path / name, cache_dir=tmp_path / "no")
    with pytest.raises(DataError, match=r"cache of data /proc/none/bigtrain cannot be written: .* Set HF_DATASETS_CACHE"):
        load_source(tmp_path / "a.jsonl", cache_dir="/proc/none")  # where no folder can be made
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DataError, match=r"cannot be written: .*No space left"):
        refuse_cache(full, tmp_path)
    refuse_cache(PermissionError(errno.EACCES, "Permission denied", "/elsewhere/data.txt"), tmp_path)  # not about the cache


def test_tables_and_compressed_files(tmp_path):
    _jsonl(tmp_path / "a.jsonl", ["a", "b"])
    assert load_source(tmp_path / "a.jsonl")["text"][:] == ["a", "b"]
    Dataset.from_dict({"text": ["p"]}).to_parquet(str(tmp_path / "a.parquet"))
    assert load_source(tmp_path / "a.parquet")["text"][:] == ["p"]
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(b'{"text": "z"}\n'))
    assert load_source(tmp_path / "z.jsonl.gz")["text"][:] == ["z"]


def test_saved_to_disk(tmp_path):
    Dataset.from_dict({"text": ["d"]}).save_to_disk(str(tmp_path / "one"))
    assert load_source(tmp_path / "one")["text"][:] == ["d"]
    both = DatasetDict({"train": Dataset.from_dict({"text": ["t"]}), "test": Dataset.from_dict({"text": ["v"]})})
    both.save_to_disk(str(tmp_path / "two"))
    assert load_source(tmp_path / "two")["text"][:] == ["t"]
    assert load_source(tmp_path / "two", "validation")["text"][:] == ["v"]
    DatasetDict({"odd": Dataset.from_dict({"text": ["t"]})}).save_to_disk(str(tmp_path / "three"))
    with pytest.raises(DataError, match=r"splits \['odd'\] but not 'train'"):
        load_source(tmp_path / "three")


def test_splits_in_a_folder_of_tables(tmp_path):
    _jsonl(tmp_path / "test" / "data" / "train-00000.jsonl", ["t"])
    _jsonl(tmp_path / "test" / "data" / "validation-00000.jsonl", ["v"])
    root = tmp_path / "test"  # a folder name above the given one tells nothing
    assert load_source(root)["text"][:] == ["t"]
    assert load_source(root, "validation")["text"][:] == ["v"]
    (root / "data" / "validation-00000.jsonl").unlink()
    with pytest.raises(DataError, match="no file for split 'validation'"):
        load_source(root, "validation")


def test_a_dataset_is_taken_as_it_is():
    dataset = Dataset.from_dict({"text": ["x"]})
    assert load_source(dataset) is dataset


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "nowhere.txt", "does not exist and matches no file"),
        ({}, "", "is an empty folder"),
        ({"a.txt": ""}, "a.txt", "are empty"),
        ({"a.txt": "a", "b.jsonl": "{}"}, "", "mixes kinds of files"),
        ({"a.bin": "a"}, "", "no file in .* has a known suffix"),
        ({"a.jsonl": '{"text": "a"}\n{"text": oops}\n'}, "a.jsonl", "cannot read .* as json .*a.jsonl line 2: JSONDecodeError"),
        (
            {"a.jsonl": '{"text": "a"}\n{"text": "b'},
            "a.jsonl",
            "line 2: JSONDecodeError: .* cut off, .* keep the 1 before it .head -n 1 ",
        ),
        (
            {"a.jsonl": b'{"text": "a"}\n{"text": "\xc3'},
            "a.jsonl",
            r"line 2: it ends within a character: .* keep the 1 before it [^U]*$",
        ),
        ({"a.jsonl": '{"text": "a"}\n\n[1, 2]\n'}, "a.jsonl", r"line 3: a list, not an object: b'\[1, 2\]"),
        ({"a.jsonl": '{"text": "a"}\n{"text": "\\ud800"}\n'}, "a.jsonl", "line 2: UnicodeEncodeError"),
        ({"a.jsonl": '{"text": "a"}\n{"text": "b", "text": "c"}\n'}, "a.jsonl", "line 2: ValueError: key 'text' stands twice"),
        ({"a.jsonl": "\n\n"}, "a.jsonl", "holds 0 samples"),
        ({"a.csv": "text\na\n"}, "a.csv", "write tables as JSON Lines or Parquet"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, files, path, message):
    for name, text in files.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=message):
        load_source(tmp_path / path)


def test_a_sample_of_parquet_files_is_named_by_file_and_row(tmp_path):
    for name, rows in (("a", [[1], [2]]), ("b", []), ("c", [[3], [-4], [5]])):
        Dataset.from_dict({"input_ids": rows}, features=_IDS).to_parquet(str(tmp_path / f"{name}.parquet"))
    source = load_source(tmp_path)
    for part, sample in ((source, 3), (source.select([4, 3]), 1)):
        with pytest.raises(DataError, match=rf"c.parquet row 1 \(the first is 0\): sample {sample}: 'input_ids' holds -4"):
            tokenise(part, None)
    with pytest.raises(DataError, match=r"^sample 0: "):  # rows of somebody's own making
        tokenise(source.map(lambda row: row, batched=True).filter(lambda row: row["input_ids"] == [-4]).flatten_indices(), None)


def test_which_parquet_file_is_damaged_or_of_another_type(tmp_path):
    for name, rows in (("a", [[1], [2]]), ("b", [[3], [4]])):
        Dataset.from_dict({"input_ids": rows}, features=_IDS).to_parquet(str(tmp_path / f"{name}.parquet"))
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:4] + bytes(40) + whole[44:])
    with pytest.raises(DataError, match=r"b.parquet, rows 0 to 1: .* damaged: get or write it anew"):
        load_source(tmp_path)
    Dataset.from_dict({"input_ids": ["3"]}).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(
        DataError, match=r"'input_ids' is list<.*> in .*a.parquet, but .*string in .*b.parquet: write all files"
    ):
        load_source(tmp_path)


def test_a_file_of_unknown_kind_is_said_to_be_read_as_text(tmp_path, caplog):
    (tmp_path / "a.jsonl.old").write_text('{"text": "a"}')
    assert load_source(tmp_path / "a.jsonl.old")["text"][:] == ['{"text": "a"}'] and "read as plain text" in caplog.text


def test_a_name_is_no_pattern(tmp_path):
    for name in ("a[1].jsonl", "a1.jsonl", "b*.jsonl", "bc.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    assert load_source(tmp_path / "a[1].jsonl")["text"][:] == ["a[1].jsonl"]
    assert load_source(tmp_path / "b*.jsonl")["text"][:] == ["b*.jsonl"]


def test_text_that_is_no_utf8_is_refused(tmp_path):
    """By its name: a folder has many."""
    (tmp_path / "a.txt").write_text("caf\u00e9", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"x" * 2**20 + b"caf\xe9")
    with pytest.raises(DataError, match=r"cannot read .*UnicodeDecodeError.* in .*b\.txt\. Text is read as UTF-8: .*iconv"):
        load_source(tmp_path)


def test_B61_a_source_without_samples_is_refused(tmp_path):
    with pytest.raises(DataError, match="0 samples"):
        load_source(Dataset.from_dict({"text": []}))


def test_validation_split_is_a_partition_and_repeats():
    dataset = Dataset.from_dict({"text": [str(i) for i in range(50)]})
    train, validation = split_validation(dataset, 0.1, seed=3)
    assert len(validation) == 5
    assert sorted(train["text"][:] + validation["text"][:], key=int) == dataset["text"][:]
    assert split_validation(dataset, 0.1, seed=3)[1]["text"][:] == validation["text"][:]
    assert split_validation(dataset, 0.1, seed=4)[1]["text"][:] != validation["text"][:]


@pytest.mark.parametrize("fraction", [0.0, 1.0, -1, 2, 0.9])
def test_bad_validation_fractions(fraction):
    with pytest.raises(DataError):
        split_validation(Dataset.from_dict({"text": ["a"]}), fraction)


def test_kind_by_columns():
    assert sample_kind(["text", "id"]) == "text"
    assert sample_kind(["input_ids", "text"]) == "input_ids"
    assert sample_kind(["messages"]) == "messages"
    assert sample_kind(["prompt", "completion"]) == "prompt"
    with pytest.raises(DataError, match=r"\['prompt'\]"):
        sample_kind(["prompt"])
    for columns, told in {
        ("prompt", "chosen", "rejected"): "Pairs of answers are for DPO",
        ("id", "conversations"): "Rename 'conversations' to 'messages', and in it 'from' to 'role'",
        ("instruction", "input", "output"): "Write 'instruction' and 'input' as one 'prompt'",
        ("body",): "such as 'body', to 'text'",
        ("id", "Content"): "such as 'Content', to 'text'",
        (
            "prompt",
            "response",
        ): "Rename 'response' to 'completion'; with datasets: dataset.rename_columns({'response': 'completion'})",
        ("question", "answer"): "Rename 'question' to 'prompt' and 'answer' to 'completion'",
        ("output",): "Rename 'output' to 'completion', beside a column 'prompt'",
    }.items():
        with pytest.raises(DataError, match=re.escape(told)):
            sample_kind(columns)
    with pytest.raises(DataError, match="'messages' and 'text': text trains on every token"):
        sample_kind(["id", "text", "messages"])
    with pytest.raises(DataError, match="'prompt' with 'completion' and 'body'"):
        sample_kind(["prompt", "completion", "body"], "body")


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfmarked \xc3\xa9")
    (tmp_path / "b.txt").write_bytes(b"plain \xc3\xa9")
    assert list(load_source(tmp_path, cache_dir=tmp_path / "cache")["text"]) == ["marked \xe9", "plain \xe9"]
