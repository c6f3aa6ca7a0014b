"""launch/slurm.sbatch: the shell of it, with stand-ins for Slurm's own commands, which no test machine has."""

import os
import subprocess

import pytest

from tests import ROOT

SCRIPT = ROOT / "launch" / "slurm.sbatch"
STOPPED = "stopped by SIGTERM after step 7; continue with --resume_from_checkpoint auto"


def submit(folder, outcome, code, *, before=None, flags=("--output_dir", "{out}")):
    """(exit code, what srun was given, what scontrol was told) of a job whose run ends so."""
    out = folder / "out"
    out.mkdir()
    if before:
        (out / "run.json").write_text(f'{{\n  "outcome": "{before}"\n}}\n')
        os.utime(out / "run.json", (1, 1))
    write = f'echo \'  "outcome": "{outcome}"\' > {out}/run.json' if outcome else ":"
    stubs = {
        "scontrol": f'[ "$1" = show ] && echo host-a && exit; echo "$@" >> {folder}/scontrol',
        "srun": f'echo "$@" > {folder}/srun; sleep 0.02; {write}; exit {code}',
    }
    (folder / "bin").mkdir()
    for name, text in stubs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "host-a",
           "SLURM_JOB_NUM_NODES": "1"}  # fmt: skip
    words = [str(SCRIPT), "--seed", "1", *(f.format(out=out) for f in flags)]
    done = subprocess.run(["bash", *words], env=env, capture_output=True, text=True, check=False)
    told = (folder / "scontrol").read_text() if (folder / "scontrol").exists() else ""
    return done.returncode, (folder / "srun").read_text(), told


@pytest.mark.parametrize("flags", [("--output_dir", "{out}"), ("--output_dir={out}",)])
def test_a_run_that_was_stopped_and_saved_queues_itself_again(tmp_path, flags):
    code, started, told = submit(tmp_path, STOPPED, 1, flags=flags)
    assert code == 1 and told == "requeue 42\n"
    assert "--kill-on-bad-exit=1 torchrun" in started and started.rstrip().endswith("--resume_from_checkpoint auto")


@pytest.mark.parametrize(
    "outcome,code,before",
    [
        ("finished", 0, None),
        ("failed: DataError: row 3", 1, None),
        ("stopped by SIGTERM after step 7; no checkpoint, because --save_steps was not given", 1, None),
        (None, 1, STOPPED),  # this start failed before it came to run.json: what is there is of the one before
        ("running", 137, STOPPED),  # killed hard in the middle
        (None, 2, None),
    ],
)
def test_any_other_end_is_an_end(tmp_path, outcome, code, before):
    assert submit(tmp_path, outcome, code, before=before)[::2] == (code, "")


def test_a_job_from_another_folder_says_where_to_start_it(tmp_path):
    """torchrun on every node said that it can't open file."""
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"no launch/train.py in {tmp_path}" in done.stderr and "--chdir" in done.stderr


def test_what_slurm_is_asked_for():
    text = SCRIPT.read_text()
    assert "#SBATCH --requeue" in text and "#SBATCH --signal=TERM@120" in text
