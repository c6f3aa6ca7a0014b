"""Names of transformers that are imported late, inside functions, exist in the version that is installed."""

import importlib

from tests.architecture.test_layers import dotted_imports, modules


def test_imported_names_of_transformers_exist():
    missing = set()
    for path in modules():
        for line, dotted in dotted_imports(path):
            home, _, name = dotted.rpartition(".")
            if dotted.split(".")[0] == "transformers" and home and not hasattr(importlib.import_module(home), name):
                missing.add(f"{path.name}:{line}: {dotted}")
    assert missing == set()
