"""Where the seconds of a load go: clocks around a few functions of bigtrain while `build_model` runs, for `--phases` of the benches.

A profiler makes the build three times as slow (0.8 million calls), clocks around some hundred calls do not show. Nothing of this is
in bigtrain: the functions are wrapped from here and put back.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

# label, module, function. A label that begins with blanks is part of the one above it; functions of the reading threads
# (THREADS) add up what all threads spent, so that twelve threads spend twelve seconds in one.
CLOCKED = (
    ("config", "bigtrain.models.build", "resolve"),
    ("DeepSpeed's zero.Init", "bigtrain.models.build", "_target"),
    ("skeleton", "bigtrain.models.build", "_construct"),
    ("partitions", "bigtrain.models.build", "shard"),
    ("  their memory and DeepSpeed's marks", "bigtrain.zero", "Partitioner.adopt"),
    ("load_into", "bigtrain.weights.load", "load_into"),
    ("  headers", "bigtrain.weights.load", "open_folder"),
    ("  tensors of the model", "bigtrain.weights.load", "slots_of"),
    ("  plan: names, shapes, checks", "bigtrain.weights.load", "plan_load"),
    ("    names of the file to names of the model", "bigtrain.weights.mapping", "file_to_model"),
    ("  reads and their destinations", "bigtrain.weights.load", "read_ops"),
    ("  reading, copying included", "bigtrain.weights.read", "Reader.run"),
    ("    preadv, all threads", "bigtrain.weights.read", "Reader._fill"),
    ("    making staging memory, all threads", "bigtrain.weights.read", "Reader._stage"),
    ("    waiting for copies, all threads", "torch.cuda.streams", "Event.synchronize"),
    ("    whole batches, all threads", "bigtrain.weights.read", "Reader._batch"),
    ("last touches", "bigtrain.models.build", "_settle"),
    ("freed memory back to the system", "bigtrain.memory.heap", "give_back"),
    ("exchanges between ranks, in all of the above", "bigtrain.ranks", "all_gather_object"),
)
Spans = dict[str, list[float]]


@contextlib.contextmanager
def clocked(wanted: bool) -> Iterator[Spans]:
    """Seconds of every call of the clocked functions inside the block, by label; garbage collections as one more. {} if not `wanted`."""
    if not wanted:
        yield {}
        return
    spans: Spans = {label: [] for label, *_ in CLOCKED}
    spans["garbage collections, in all of the above"] = collections = []
    began = [0.0]

    def collecting(when: str, info: Any) -> None:
        if when == "start":
            began[0] = time.perf_counter()
        else:
            collections.append(time.perf_counter() - began[0])

    with contextlib.ExitStack() as stack:
        for label, module, name in CLOCKED:
            stack.callback(_wrap(module, name, spans[label]))
        gc.callbacks.append(collecting)
        stack.callback(gc.callbacks.remove, collecting)
        yield spans


def _wrap(module: str, name: str, spans: list[float]) -> Callable[[], None]:
    """Put a clock around a function or method; returns what puts it back."""
    owner: Any = importlib.import_module(module)
    *classes, name = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spans.append(time.perf_counter() - begin)  # list.append is atomic

    setattr(owner, name, timed)
    return lambda: setattr(owner, name, function)


def table(spans: Spans, seconds: float) -> str:
    """Markdown: seconds and calls of every phase, and what of the whole is in none of them."""
    lines = ["| phase | s | calls |", "|---|---|---|", f"| build_model | {seconds:.4f} | 1 |"]
    lines += [f"| {'&nbsp;' * (len(label) - len(label.lstrip()))}{label.strip()} | {sum(found):.4f} | {len(found)} |"
              for label, found in spans.items() if found]  # fmt: skip
    above = [label for label, *_ in CLOCKED if not label.startswith(" ") and "all of the above" not in label]
    lines.append(f"| not in any of these | {seconds - sum(sum(spans[label]) for label in above):.4f} | |")
    return "\n".join(lines)
