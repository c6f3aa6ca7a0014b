"""Imports point down one way; one module knows DeepSpeed; plain parts start without torch."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "bigtrain"

# The rows, lowest first. A part imports parts of lower rows only; parts of one row do not know each other.
ROWS: list[set[str]] = [
    {"errors", "shapes_families", "standins"},
    {"defaults", "partition", "runfile", "shapes", "versions"},
    {"guards", "config", "plan", "whereabouts"},
    {"builds", "memory", "ranks", "stopping"},
    {"hosts", "watch"},
    {"meeting"},
    {"zero"},
    {"kernels"},
    {"weights", "optim", "data", "diagnostics"},
    {"checkpoint", "models"},
    {"engine"},
    {"run"},
    {"train"},
    {"cli", "bench"},
]
LEVEL = {part: level for level, row in enumerate(ROWS) for part in row}
FACADES = {"", "__init__", "__main__"}  # the lazy package itself and `python -m bigtrain`
# Plain Python: importing these may not load what takes seconds.
PLAIN = (
    "errors",
    "defaults",
    "whereabouts",
    "shapes",
    "shapes_families",
    "standins",
    "partition",
    "hosts.ports",
    "versions",
    "config",
    "plan",
    "run.arguments",
    "run.auto",
    "bench",
    "cli",
)
HEAVY = ("torch", "transformers", "deepspeed", "numpy", "pandas", "datasets", "matplotlib")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def dotted_imports(path: Path) -> list[tuple[int, str]]:
    """(line, full dotted name) of everything imported anywhere in the file, TYPE_CHECKING blocks left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def edges() -> list[tuple[str, str, str]]:
    """(part, imported part, where) for every import between parts of bigtrain."""
    out = []
    for path in modules():
        for line, name in dotted_imports(path):
            words = name.split(".")
            if words[0] == "bigtrain" and len(words) > 1 and words[1] in LEVEL and words[1] != part_of(path):
                out.append((part_of(path), words[1], f"{path.relative_to(ROOT)}:{line}"))
    return out


def test_every_part_has_a_row():
    assert {part_of(p) for p in modules()} - FACADES - set(LEVEL) == set()


def test_imports_point_down():
    wrong = [f"{where}: {a} imports {b}" for a, b, where in edges() if a not in FACADES and LEVEL[b] >= LEVEL[a]]
    assert wrong == []


def test_modules_of_a_folder_form_no_circle():
    """Inside of a folder too: each module can be read with nothing in mind but what it imports."""
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in modules()}
    below: dict[str, set[str]] = {}
    for module, path in names.items():
        imported = {n if n in names else n.rpartition(".")[0] for _, n in dotted_imports(path)}
        folder = f"bigtrain.{part_of(path)}"
        below[module] = {n for n in imported & names.keys() if f"{n}.".startswith(f"{folder}.")} - {module}
    below["bigtrain.weights.load"].remove("bigtrain.weights.verify")  # only when asked for; it reads as a load does
    assert list(TopologicalSorter(below).static_order())  # raises CycleError, with the modules


def test_one_door_to_deepspeed():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for line, name in dotted_imports(path)
        if name.split(".")[0] == "deepspeed" and part_of(path) != "zero"
    ]
    assert wrong == []


def test_plain_parts_import_nothing_heavy():
    every = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in modules()]
    names = [n for n in every if f"{n}.".startswith(tuple(f"bigtrain.{plain}." for plain in PLAIN))]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = set({HEAVY!r}) & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {sorted(heavy)}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_imports_nothing_heavy():
    code = f"import bigtrain, sys; sys.exit(bool(set({HEAVY!r}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "misc"])
def test_no_module_without_a_noun(name):
    assert [p for p in [*modules(), *(ROOT / "tests").rglob("*.py")] if name in (p.stem, p.parent.name)] == []


def test_no_file_is_too_long():
    assert {str(p.relative_to(ROOT)): n for p in modules() if (n := len(p.read_text().splitlines())) > 450} == {}


def test_no_function_is_too_long():
    def length(node: ast.AST) -> int:
        body = node.body  # type: ignore[attr-defined]
        doc = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
        first = body[1] if doc and len(body) > 1 else body[0]
        return node.end_lineno - first.lineno + 1  # type: ignore[attr-defined]

    long = {
        f"{p.relative_to(ROOT)}:{node.lineno} {node.name}": length(node)
        for p in modules()
        for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and length(node) > 60
    }
    assert long == {}


def test_everything_public_is_documented():
    bare = []
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if not ast.get_docstring(tree):
            bare.append(str(path.relative_to(ROOT)))
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert bare == []
