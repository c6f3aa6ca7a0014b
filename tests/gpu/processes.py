"""A function of a test in a process of its own: with its own CUDA context, allocator and process group."""

import json
import os
import subprocess
import sys

from tests import python_path

CALL = """
import importlib, json, sys
module, name, arguments = json.loads(sys.argv[1])
print(json.dumps(getattr(importlib.import_module(module), name)(*arguments)))
"""


def on_a_card(function, *arguments, **environment):
    """What `function`, of a module of the tests, returns there; arguments and result go as JSON."""
    env = {**os.environ, "PYTHONPATH": python_path(), "DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0", **environment}
    what = json.dumps([function.__module__, function.__name__, arguments], default=str)
    done = subprocess.run([sys.executable, "-c", CALL, what], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
