"""The `bigtrain` command: verbs, errors, and a start that a login node can afford."""

import argparse
import errno
import os
import resource
import subprocess
import sys

import pytest

from bigtrain import cli
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.stopping import EXIT_INTERRUPTED
from tests import python_path

START_LIMIT_S = 0.3
START_LIMIT = 20  # times what Python takes to start; measured: 12


def test_help_lists_every_verb(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"  {verb} " in printed for verb in cli.VERBS) and "deepspeed launch/train.py" in printed


def test_the_module_is_the_command_too():
    done = subprocess.run([sys.executable, "-m", "bigtrain.cli", "pln"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean plan?" in done.stderr  # it was silent, and ended well


def test_no_verb_is_bad_usage(capsys):
    assert cli.main([]) == 2
    assert "verbs:" in capsys.readouterr().out


def test_unknown_verb(capsys):
    assert cli.main(["pln"]) == 2
    assert "unknown verb 'pln': did you mean plan?" in capsys.readouterr().err


@pytest.mark.parametrize("error", [UsageError("wrong flag"), DoesNotFitError("12 GiB too much")])
def test_errors_print_without_traceback_and_give_the_exit_code(error, monkeypatch, capsys):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["plan"]) == error.exit_code
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_has_a_parser_that_says_what_to_run(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert verb in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (
            ["plan", "--model", "preset:llama-1b", "--batch", "--micro_bach", "3"],
            "bigtrain plan does not know --batch --micro_bach 3",
        ),
        (["plan", "--model", "preset:llama-1b", "--micro_bach", "3"], "did you mean --micro_batch?"),
        (["config", "lint", "zero2", "--world_sise", "3"], "did you mean --world_size?"),
        (["plan", "--model", "llama-3"], "preset:llama-3b"),
        (["plan", "--model", "meta-llama/Llama-3-8B"], "no hub is asked"),
        (["export", "/nothing/there", "/tmp/x"], "there is no folder /nothing/there"),
        (["verify", "/nothing/there"], "there is no folder /nothing/there"),
        (["inspect", "/nothing/there"], "there is no folder /nothing/there"),
    ],
)
def test_what_is_not_there_is_said_to_be(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_every_verb_says_what_it_is_for_and_every_flag_what_it_does():
    def look(parser):
        assert parser.description, parser.prog
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    look(inner)
            else:
                assert action.help, (parser.prog, action.option_strings or action.dest)

    for verb in cli.VERBS:
        look(cli.make_parser(verb))


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([verb, "--help"] for verb in sorted(cli.VERBS))], ids=" ".join)
def test_start_is_quick_and_without_torch(words):
    code = (
        "import sys\nfrom bigtrain.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\nsys.exit(bool(heavy))"
    )
    bare = min(_processor_s("pass") for _ in range(3))
    # Fastest of three: other work on the machine is not the command's doing. Nor is a slow processor.
    assert min(_processor_s(code) for _ in range(3)) < max(START_LIMIT_S, START_LIMIT * bare)


def _processor_s(code: str) -> float:
    """Of a Python that runs the code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, f"imported {done.stderr}"
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("words", [["--optim", "adamww"], ["--lr_scheduler_type", "cosin"]])
def test_optimizers_and_schedules_that_there_are_not_are_refused(words, capsys):
    assert cli.main(["config", "resolve", "zero3", *words]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_names_that_the_terminal_cannot_show_are_shown_all_the_same(tmp_path):
    (tmp_path / "odd.json").write_text('{"\\ud800": 1}')
    command = [
        sys.executable,
        "-c",
        "import sys\nfrom bigtrain.cli import main\nsys.exit(main())",
        "config",
        "lint",
        "odd.json",
    ]
    env = {**os.environ, "PYTHONPATH": python_path(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "\\ud800" in done.stdout and not done.stderr


ENDS = """
import os, sys
from bigtrain.stopping import exit_code

def command():
    print("a plan " * 5000)
    return 0

sys.exit(exit_code(command))
"""


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ('"$@" >&-', 0, ""),  # it ended in a traceback about None
        ('"$@" > /dev/full', 1, "the output cannot be written: no space is left there\n"),
        ('"$@" | true; exit ${PIPESTATUS[0]}', 1, ""),
        ('mkdir gone && cd gone && rmdir ../gone && "$@"', 2, "the folder that this was called in has been removed: cd to one that is there\n"),
    ],
)  # fmt: skip
def test_where_the_output_goes_or_the_folder_is_gone_ends_in_no_traceback(shell, code, said, tmp_path):
    """As the installed command ends: the interpreter tries once more to write what is left."""
    command = ["bash", "-c", shell, "bash", sys.executable, "-c", ENDS]
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.removeprefix(GONE)) == (code, said)


GONE = "shell-init: error retrieving current directory: getcwd: cannot access parent directories: No such file or directory\n"


def test_ctrl_c_ends_in_no_traceback(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["plan"]) == EXIT_INTERRUPTED and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["config", "lint", "zero3", "--model", ""], "the value after --model is empty (a shell variable that is not set?)"),
        (["plan", "--model="], "the value after --model is empty"),
        (["doctor", "--quick", "--world_size", "9" * 20], "ranks of this host, from 1 to 1,024"),
        (["config", "generate", "--stage", "2", "--warmup_steps", "-1"], "must be a whole number of at least 0"),
        (["config", "generate", "--stage", "2", "--max_steps", "0"], "must be a whole number of at least 1"),
        (["config", "lint", "zero3", "--world_size", "9" * 20], "99999999999999999999 ranks (launcher): a step of"),
        (["config", "lint", "zero3", "--model", "MODEL"], "the model config has hidden_size = 'big': a positive whole number"),
        (["config", "lint", "LIST"], "a ds_config is an object {...}, this is null"),
    ],
)
def test_values_that_no_run_can_have_are_refused(words, said, capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "big"}')
    (tmp_path / "list.json").write_text("null")
    there = {"MODEL": str(tmp_path), "LIST": str(tmp_path / "list.json")}
    assert cli.main([there.get(word, word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert said in out + err


def test_a_full_disk_is_said(monkeypatch, capsys):
    def fail(words):
        raise OSError(errno.ENOSPC, "No space left on device")  # `bigtrain plan > /full/plan.txt`

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["plan"]) == 1 and "no space is left" in capsys.readouterr().err


def test_an_environment_that_keeps_its_compiled_ops_finds_them_again(tmp_path):
    """After `make train` the next command compiled DeepSpeed's CPU Adam once more, into the cache of all environments."""
    code = f"import os, sys; sys.prefix = {str(tmp_path)!r}; import bigtrain; print(os.environ.get('TORCH_EXTENSIONS_DIR'))"
    env = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"} | {"PYTHONPATH": python_path()}

    def found(**more):
        return subprocess.run([sys.executable, "-c", code], env=env | more, check=True, capture_output=True, text=True).stdout

    assert found() == "None\n"
    (tmp_path / "torch_extensions").mkdir()
    assert found() == f"{tmp_path}/torch_extensions\n" and found(TORCH_EXTENSIONS_DIR="mine") == "mine\n"


def test_a_machine_with_cudas_toolkit_and_no_card_is_not_warned_of():
    code = (
        "import logging, bigtrain; log = logging.getLogger('torch.utils.cpp_extension'); logging.basicConfig(); "
        "log.warning(\"No CUDA runtime is found, using CUDA_HOME='%s'\", '/usr'); log.warning('else')"
    )
    env = {**os.environ, "PYTHONPATH": python_path()}
    said = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stderr
    assert said == "WARNING:torch.utils.cpp_extension:else\n"


def test_a_backend_of_liger_kernel_that_is_not_installed_is_not_warned_of():
    """liger-kernel 0.8.5 (backends/registry.py) looks for each kernel in all backends; one that fails otherwise is told."""
    code = (
        "import logging, bigtrain; log = logging.getLogger('liger_kernel.backends.registry'); logging.basicConfig()\n"
        "for kind in ('ModuleNotFoundError', 'RuntimeError'):\n"
        "    log.warning(\"Backend impl '%s' for op '%s' could not be imported: %s: %s\", 'a.b', 'rms_norm', kind, 'why')\n"
        "log.warning('else')"
    )
    env = {**os.environ, "PYTHONPATH": python_path()}
    said = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stderr
    name = "WARNING:liger_kernel.backends.registry:"
    assert said == f"{name}Backend impl 'a.b' for op 'rms_norm' could not be imported: RuntimeError: why\n{name}else\n"


def test_short_names_of_types_are_taken():
    from bigtrain.checkpoint import cli as verbs

    parser = argparse.ArgumentParser()
    verbs.add_parsers(parser.add_subparsers())
    given = [parser.parse_args(["export", "a", "b", "--dtype", name]).dtype for name in ("bf16", "fp16", "fp32", "float32")]
    assert given == ["bfloat16", "float16", "float32", "float32"]
