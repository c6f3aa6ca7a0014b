"""Names that scripts rely on, and the flags that a run takes."""

import os
import shutil
import subprocess
import sys
import zipfile

from tests import ROOT

FLAGS = set(
    """adam_beta1 adam_beta2 adam_epsilon allow_missing allow_unexpected attn_implementation bf16 checkpoint_blocks checkpointing_policy copy_checkpoints_to data_seed
    dataloader_num_workers ddp_timeout disable_tqdm ds_config eval_data eval_fraction eval_steps eval_strategy freeze gpu_memory_cap
    gradient_accumulation_steps gradient_checkpointing hang_s keep_every keep_in_fp32 leaf_blocks learning_rate load_best_model_at_end logging_steps logging_strategy lr_scheduler_kwargs
    lr_scheduler_type max_grad_norm max_steps mlp_tile_tokens model_name_or_path no_export no_plan no_preflight
    nonfinite_limit num_train_epochs offload_gradients optim output_dir overwrite_output_dir packing per_device_eval_batch_size
    per_device_train_batch_size report_to resize_vocab resume_from_checkpoint run_name save_only_model save_steps save_strategy save_total_limit seed seq_len
    tokenizer_name_or_path torch_compile train_data trust_remote_code use_liger_kernel verify_load warmup_ratio warmup_steps
    weight_decay""".split()  # noqa: SIM905
)
# Ours alone; every other flag is one of transformers' TrainingArguments or of its example scripts.
OWN_FLAGS = {
    "allow_missing", "allow_unexpected", "checkpoint_blocks", "checkpointing_policy", "copy_checkpoints_to", "ds_config", "eval_data", "eval_fraction", "freeze", "gpu_memory_cap", "hang_s", "keep_every", "keep_in_fp32", "mlp_tile_tokens",
    "leaf_blocks", "no_export", "no_plan", "no_preflight", "nonfinite_limit", "offload_gradients", "packing", "resize_vocab", "seq_len", "train_data", "verify_load",
}  # fmt: skip
EXAMPLE_SCRIPT_FLAGS = {
    "attn_implementation", "model_name_or_path", "tokenizer_name_or_path", "trust_remote_code", "overwrite_output_dir",
}  # fmt: skip


def test_flags_are_frozen():
    """A new flag is a decision: a config key or a better default may do."""
    from dataclasses import fields

    from bigtrain.run.arguments import TrainArguments

    assert {f.name for f in fields(TrainArguments)} == FLAGS


def test_flags_carry_the_names_of_transformers():
    from transformers import TrainingArguments

    theirs = set(TrainingArguments.__dataclass_fields__)
    moved = {"warmup_ratio", "overwrite_output_dir"}  # in some of the supported versions only
    assert FLAGS - theirs - OWN_FLAGS - EXAMPLE_SCRIPT_FLAGS - moved == set()


def test_lazy_names_of_the_package():
    code = (
        "import bigtrain\n"
        "assert bigtrain.__all__ == ['Engine', '__version__', 'build_model']\n"
        "from bigtrain import Engine, build_model\n"
        "from bigtrain.engine import Engine as direct\n"
        "from bigtrain.models import build_model as builder\n"
        "assert Engine is direct and build_model is builder\n"
        "for name in ('load_into', 'export_model'):\n"
        "    assert hasattr(__import__('bigtrain.weights', fromlist=['x']), name)\n"
        "try:\n    bigtrain.nothing\nexcept AttributeError as error:\n    assert 'nothing' in str(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_top_level_layout():
    for name in ("setup.cfg", "setup.py", "bigtrain", "ds_configs", "launch", "tests", "README.md", "CHANGELOG.md",
                 "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt", ".ci/run"):  # fmt: skip
        assert (ROOT / name).exists(), name


def test_constraints_name_every_direct_dependency():
    import configparser
    import re

    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    listed = metadata["options"]["install_requires"] + metadata["options.extras_require"]["dev"]
    wanted = {re.split(r"[<>=; ]", line.strip())[0].lower() for line in listed.splitlines() if line.strip()}
    pinned = {
        re.split(r"[<>=]", line)[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "=" in line
    }
    assert wanted - pinned == set()


def test_package_data_travels():
    """Every file of the package that is no module is in the package data, and every folder of modules is a package."""
    import configparser

    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    package = ROOT / "bigtrain"
    listed = {path for pattern in metadata["options.package_data"]["bigtrain"].split() for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files - listed == set()
    assert {path.parent for path in package.rglob("*.py") if not (path.parent / "__init__.py").exists()} == set()


def test_an_editable_installation_is_found_beside_the_clone(tmp_path):
    """There the clone itself looks like a package `bigtrain` without files; a finder of setuptools would come after it."""
    clone, site = tmp_path / "work" / "bigtrain", tmp_path / "site"
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE", "bigtrain/__init__.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(site)], capture_output=True, text=True, cwd=clone, check=False)
    assert done.returncode == 0, done.stderr
    zipfile.ZipFile(next(site.glob("*.whl"))).extractall(site)
    code = f"import site; site.addsitedir({str(site)!r}); from bigtrain import __version__, __file__; print(__file__)"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(  # -S: the environment's own editable installation would be found first
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=clone.parent, check=False, env=environment
    )
    assert done.stdout.strip() == str(clone / "bigtrain" / "__init__.py"), done.stderr


# A Python 3.10, as far as `-c` and a script are concerned; it makes no environment.
OLD = """#!/bin/sh
exec {python} -c 'import sys; sys.version_info = (3, 10, 13); sys.argv[:1] = []
exec(sys.argv[1] if sys.argv[0] == "-c" else open(sys.argv[0]).read())' "$@"
"""


def test_too_old_a_python_is_said_before_anything_is_fetched_or_made(tmp_path):
    """By make, which would leave an environment that later calls take, and by setup.py, which pip calls before it fetches torch."""
    import configparser

    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    assert metadata["options"]["python_requires"] == ">=3.11"
    old, venv = tmp_path / "python3.10", tmp_path / "venv"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    done = subprocess.run([old, ROOT / "setup.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, "needs Python 3.11 or later, this is 3.10.13" in done.stderr) == (1, True), done.stderr
    for there in (False, True):  # an environment that an earlier call made
        if there:
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").symlink_to(old)
            (venv / "bin" / "pip").symlink_to(old)
        make = ["make", "train", f"VENV={venv}", f"PYTHON={sys.executable if there else old}"]
        done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stdout
        assert f"{venv / 'bin' / 'python' if there else old} is Python 3.10, and bigtrain needs 3.11 or later" in done.stderr, (
            done.stderr
        )
        assert venv.exists() == there
        assert not (venv / ".installed").exists()


def test_training_without_the_clone():
    """A wheel has no launch/: the module is a program too."""
    done = subprocess.run(
        [sys.executable, "-m", "bigtrain.train", "--seq_len", "few"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, "few" in done.stderr) == (2, True), done.stderr
