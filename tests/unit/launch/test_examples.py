"""The examples say how they are called."""

import runpy
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "launch" / "examples"


@pytest.mark.parametrize(
    "name, usage", [("custom_loop", "text tokenizer_dir out"), ("vision", "teacher out"), ("lora", "model_dir text out")]
)
@pytest.mark.parametrize("words", [[], ["--local_rank=0"], ["one", "two", "three", "four"]])
def test_wrong_arguments_get_the_usage(name, usage, words, monkeypatch, capsys):
    """Without arguments custom_loop.py ended with IndexError."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {name}.py [-h] {usage}")
