"""What bigtrain/zero uses of DeepSpeed exists, takes our arguments, and is listed; the presets run."""

import ast
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

from tests import ROOT

ZERO = sorted((ROOT / "bigtrain" / "zero").glob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ZERO}
LISTING = ast.get_docstring(TREES[ROOT / "bigtrain" / "zero" / "__init__.py"]) or ""
NODES = [(path, node) for path, tree in TREES.items() for node in ast.walk(tree)]


def resolve(dotted):
    """The object behind a dotted name: the longest module that can be imported, then attributes.

    In that order, because deepspeed.utils also has a class with the name of its module tensor_fragment.
    """
    words = dotted.split(".")
    for cut in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:cut]))
        except ModuleNotFoundError:
            continue
        for word in words[cut:]:
            found = getattr(found, word)
        return found
    raise ImportError(dotted)


def imported_symbols():
    """{local name: dotted name} of everything imported from DeepSpeed, also inside functions."""
    names = {}
    for _, node in NODES:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed":
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.asname or a.name.split(".")[0]: (a.name if a.asname else "deepspeed") for a in node.names
                      if a.name.split(".")[0] == "deepspeed"}  # fmt: skip
    return names


SYMBOLS = imported_symbols()


def dotted(node):
    """`deepspeed.zero.Init` of an attribute chain that begins with an imported name, else None."""
    words = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in SYMBOLS:
        return ".".join([SYMBOLS[node.id], *reversed(words)])
    return None


def test_every_symbol_exists():
    used = set(SYMBOLS.values()) | {d for _, n in NODES if isinstance(n, ast.Attribute) and (d := dotted(n))}
    missing = []
    for name in sorted(n for n in used if not n.endswith(".linear_bk")):  # set as DeepSpeed first enters zero.Init
        try:
            resolve(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_every_call_takes_our_keyword_arguments():
    wrong = []
    for path, node in NODES:
        name = dotted(node.func) if isinstance(node, ast.Call) else None
        if name is None:
            continue
        try:
            takes = inspect.signature(resolve(name)).parameters
        except (TypeError, ValueError):
            continue
        if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            continue
        wrong += [f"{path.name}:{node.lineno} {name}({k.arg}=)" for k in node.keywords if k.arg and k.arg not in takes]
    assert wrong == []


def test_every_imported_symbol_is_listed():
    assert [name for name in SYMBOLS.values() if name.split(".")[-1] not in LISTING and name not in ("deepspeed.comm",)] == []


def test_what_others_take_through_the_door_exists_and_is_listed():
    """`zero.deepspeed.ops.adam.FusedAdam` outside of the folder."""
    taken = {
        found
        for path in (ROOT / "bigtrain").rglob("*.py")
        for found in re.findall(r"\bzero\.(deepspeed(?:\.\w+)+)", path.read_text(encoding="utf-8"))
    }
    assert taken and {name for name in taken if name.split(".")[-1] not in LISTING} == set()
    for name in taken:
        resolve(name)


def test_the_pinned_version_is_the_one_installed():
    import deepspeed

    assert f"pinned: {deepspeed.__version__.split('+')[0]}" in LISTING


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda p: p.stem)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_presets_lint_clean_and_resolve(path, device):
    from bigtrain.config import ModelShape, RunValues, lint, load, resolve

    config = load(path)
    assert [p for p in lint(config, world_size=2) if p.severity != "note"] == []
    run = RunValues(micro_batch=1, total_steps=10)
    done = resolve(config, run=run, model=ModelShape.from_config("preset:llama-tiny"), world_size=2, device=device)
    assert '"auto"' not in json.dumps(done.config)


@pytest.mark.parametrize("name", ["zero/flat", "zero/held", "engine/hostgradients", "engine/reduction"])
def test_internal_attributes_that_other_modules_list_exist(name):
    """Instance attributes cannot be looked up on a class: DeepSpeed's own sources must mention each."""
    import deepspeed

    source = (ROOT / "bigtrain" / f"{name}.py").read_text()
    listing = (ast.get_docstring(ast.parse(source)) or "").split("0.19.8")[1]
    listed = set(re.findall(r"\b_?[a-z]\w*_\w+\b", listing))
    runtime = Path(deepspeed.__file__).parent / "runtime"
    places = (
        "engine.py",
        "bf16_optimizer.py",
        "base_optimizer.py",
        "zero/stage3.py",
        "zero/stage_1_and_2.py",
        "zero/partition_parameters.py",
    )
    known = set(re.findall(r"\w+", "".join((runtime / place).read_text() for place in places)))
    assert len(listed) > 5 and listed - known - {"zero_optimizers"} == set()
    code = set(re.findall(r"\w+", source.split('"""', 2)[2]))
    assert listed - code == set()  # listed, and used no more
