"""A grid file and the cells it stands for.

model: [preset:llama-1b, preset:llama-3b]     # a list is an axis: every combination is a cell
ds_config: [zero2, zero3_offload]             # preset, file, mapping, or auto
ds_config.zero_optimization.reduce_bucket_size: 100000000     # one value of the ds_config, over the file's
seq_len: 4096                                 # any argument of launch/train.py, under any of its names
micro_batch: [1, 4]
freeze: [[], [model.embed_tokens]]            # where the value itself is a list, the axis is a list of lists
runner: [bigtrain, raw_deepspeed, hf_trainer]
num_gpus: 1                                   # ranks; on a CPU, processes
steps: 8                                      # optimizer steps, of which
warmup: 3                                     # the first are left out of the timing
max_cell_s: 900                               # then the cell is killed
env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}
cells: [{model: preset:llama-8b, optim: adamw_split_8bit}]    # further grids on top of the above; without: one
exclude: [{runner: hf_trainer, model: preset:llama-8b}]       # cells that match all values of an entry are left out
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from bigtrain import defaults, shapes
from bigtrain.bench import values as argument_values
from bigtrain.config import load
from bigtrain.errors import UsageError
from bigtrain.run.arguments import TrainArguments
from bigtrain.runfile import read_run_file

RUNNERS = ("bigtrain", "raw_deepspeed", "hf_trainer")
_OWN = ("runner", "num_gpus", "steps", "warmup", "max_cell_s", "env")
_SHORT = {"model": "model_name_or_path", "accumulation": "gradient_accumulation_steps", "num_ranks": "num_gpus"}
# The sweep decides these itself.
_TAKEN = ("output_dir", "max_steps", "overwrite_output_dir", "report_to", "resume_from_checkpoint", "no_export", "disable_tqdm")
# What peers would pass over, and so compute something else.
_BIGTRAINS = (
    "checkpoint_blocks", "checkpointing_policy", "leaf_blocks", "mlp_tile_tokens", "torch_compile", "freeze", "keep_in_fp32", "offload_gradients",
    "train_data",
)  # fmt: skip
PEER_OPTIMIZERS = ("adamw", "adamw_8bit")
_LISTS = ("freeze", "keep_in_fp32")
_OVERRIDE = "ds_config."


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep.

    Attributes:
        runner: `bigtrain` (launch/train.py), or a peer on the same inputs: `raw_deepspeed`, `hf_trainer`.
        num_gpus: ranks. steps: optimizer steps, the first `warmup` of which are not timed. max_cell_s: time limit.
        ds_config: content, or "auto". ds_name: what the grid called it.
        arguments: of launch/train.py, by their own names. env: further environment variables of the ranks.
    """

    runner: str = "bigtrain"
    num_gpus: int = 1
    steps: int = 8
    warmup: int = 3
    max_cell_s: float = 900.0
    ds_config: Any = field(default_factory=dict)
    ds_name: str = "ds_config"
    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """`preset:NAME` or a folder."""
        return str(self.arguments["model_name_or_path"])

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return int(self.arguments["seq_len"])

    @cached_property
    def told(self) -> TrainArguments:
        """The arguments as launch/train.py takes them, those of the sweep itself among them."""
        return argument_values.as_told(self.arguments, self.ds_config)

    def settings(self) -> dict[str, Any]:
        """Flat plain values, for tables and comparison."""
        named = {"runner": self.runner, "num_gpus": self.num_gpus, "ds_config": self.ds_name, "steps": self.steps}
        return {**named, "warmup": self.warmup, **self.arguments, **({"env": self.env} if self.env else {})}

    def key(self, code: str, card: str) -> str:
        """Names what was measured: equal for the same settings, code and card. The time limit does not matter."""
        what = [self.settings(), self.ds_config, code, card]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:12]


def read_grid(path: str | Path) -> list[Cell]:
    """All cells of a grid file (YAML or JSON), in the order of its axes.

    Raises:
        UsageError, ConfigError: the file, a key or a value cannot be used; nothing has run then.
    """
    try:
        return expand(read_run_file(str(path)), Path(path).parent)
    except UsageError as error:
        error.args = (f"{path}: {str(error).removeprefix('grid: ')}", *error.args[1:])
        raise


def expand(grid: Mapping[str, Any], folder: Path = Path()) -> list[Cell]:
    """The cells of a parsed grid; ds_config files may be given relative to `folder`. Equal cells appear once."""
    base = _settings(grid)
    parts = grid.get("cells") or [{}]
    left_out = grid.get("exclude") or []
    for name, value in (("cells", parts), ("exclude", left_out)):
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise UsageError(f"grid: {name} must be a list of mappings, got {value!r}")
    cells: list[Cell] = []
    excluded = [_canonical(entry) for entry in left_out]
    for part in parts:
        for values in _combinations(_canonical(base) | _canonical(part)):
            if any(all(values.get(k) == v for k, v in entry.items()) for entry in excluded):
                continue
            try:
                cell = _cell(values, folder)
            except UsageError as error:
                error.args = (f"{str(error).rstrip()}{_which(values, grid, part)}", *error.args[1:])
                raise
            if cell not in cells:
                cells.append(cell)
    if not cells:
        raise UsageError("grid: no cell is left; check `exclude` and empty lists")
    return cells


def _which(values: Mapping[str, Any], *written: Mapping[str, Any]) -> str:
    """The cell of these values, by what the grid has several of; empty of a grid that has one cell."""
    axes = {name for one in written for name, value in _canonical(_settings(one)).items() if _is_axis(name, value)}
    own = _canonical(_settings(written[-1])) if written[0].get("cells") else {}
    told = [f"{name} {value!r}" for name, value in values.items() if name in axes or name in own]
    return f" (in the cell of {', '.join(told)})" if told else ""


def _settings(grid: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in grid.items() if name not in ("cells", "exclude", "name")}


def _names() -> dict[str, str]:
    """Every spelling of a key -> its own name."""
    known = {name: name for name in _OWN} | _SHORT
    for each in fields(TrainArguments):
        known[each.name] = each.name
        for alias in each.metadata["aliases"]:
            known.setdefault(alias.lstrip("-").replace("-", "_"), each.name)
    return known


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    known, out = _names(), {}
    for key, value in values.items():
        name = key if str(key).startswith(_OVERRIDE) else known.get(str(key).replace("-", "_"))
        if name is None:
            near = difflib.get_close_matches(str(key), known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"besides arguments of launch/train.py: {', '.join(_OWN)}"
            raise UsageError(f"grid: unknown key {key!r}: {hint}")
        if name in _TAKEN:
            raise UsageError(f"grid: {key} is decided by the sweep itself (steps, output folders): leave it out")
        if name in out:
            raise UsageError(f"grid: {name} is given twice, under two of its names")
        out[name] = value
    return out


def _combinations(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    axes = {k: v if _is_axis(k, v) else [v] for k, v in values.items()}
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen))


def _is_axis(key: str, value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return key not in _LISTS or any(isinstance(v, list) for v in value)


def _cell(values: Mapping[str, Any], folder: Path) -> Cell:
    overrides = {k.removeprefix(_OVERRIDE): v for k, v in values.items() if k.startswith(_OVERRIDE)}
    own = {k: v for k, v in values.items() if k in _OWN and v is not None}
    left = {k: v for k, v in values.items() if k not in _OWN and not k.startswith(_OVERRIDE) and v is not None}
    if "model_name_or_path" not in left or "ds_config" not in left:
        raise UsageError("grid: `model` (preset:NAME or a folder) and `ds_config` (preset, file or mapping) are needed")
    config, name = _ds_config(left.pop("ds_config"), overrides, folder)
    env = own.get("env") or {}
    if not isinstance(env, dict) or not all(map(_is_variable, env, env.values())):
        raise UsageError(f"grid: env is {env!r}; it must be a mapping of variables, {{NAME: value}}, of texts or numbers")
    own["env"] = {str(k): str(v) for k, v in env.items()}
    left.setdefault("seq_len", defaults.SEQ_LEN)
    if isinstance(left.get("leaf_blocks"), bool):  # YAML reads on and off as true and false
        left["leaf_blocks"] = "on" if left["leaf_blocks"] else "off"
    if isinstance(left.get("lr_scheduler_kwargs"), dict):
        left["lr_scheduler_kwargs"] = json.dumps(left["lr_scheduler_kwargs"])
    cell = Cell(**own, ds_config=config, ds_name=name, arguments=left)
    _check(cell)
    return cell


def _is_variable(name: Any, value: Any) -> bool:
    """True for what the system takes and YAML has left as it was written: of yes and no it makes true and false."""
    said = isinstance(value, str | int | float) and not isinstance(value, bool)
    return bool(name) and isinstance(name, str) and "=" not in name and said and "\0" not in f"{name}{value}"


def _ds_config(value: Any, overrides: Mapping[str, Any], folder: Path) -> tuple[Any, str]:
    if value == "auto":
        if overrides:
            raise UsageError(f"grid: ds_config auto chooses everything; {_OVERRIDE}{next(iter(overrides))} cannot be set too")
        return "auto", "auto"
    if not isinstance(value, str | dict):
        raise UsageError(f"grid: ds_config is {value!r}; it must be a preset, a file, a mapping or auto")
    beside = folder / value if isinstance(value, str) else None
    config = load(beside if beside is not None and beside.is_file() else value)
    name = Path(value).stem if isinstance(value, str) else _describe(config)
    for path, one in overrides.items():
        *above, last = path.split(".")
        inner = config
        for key in above:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise UsageError(f"grid: {_OVERRIDE}{path} cannot be set: {key} is {inner!r} in the ds_config")
        inner[last] = one
        name += f" {last}={one}"
    return config, name


def _describe(config: Mapping[str, Any]) -> str:
    zero = config.get("zero_optimization") or {}
    words = [f"zero{zero.get('stage', 0)}"]
    words += [k for k in ("offload_optimizer", "offload_param") if (zero.get(k) or {}).get("device", "none") != "none"]
    return " ".join(words)


def _check(cell: Cell) -> None:
    if cell.runner not in RUNNERS:
        raise UsageError(f"grid: runner is {cell.runner!r}; it must be one of {', '.join(RUNNERS)}")
    if cell.runner != "bigtrain":
        _check_peer(cell)
    for name in ("num_gpus", "steps"):
        value = getattr(cell, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"grid: {name} is {value!r}; it must be a whole number of at least 1")
    if isinstance(cell.warmup, bool) or not isinstance(cell.warmup, int) or not 0 <= cell.warmup < cell.steps:
        raise UsageError(
            f"grid: warmup {cell.warmup!r} leaves none of {cell.steps} steps to measure: give a whole number below steps"
        )
    if isinstance(cell.max_cell_s, bool) or not isinstance(cell.max_cell_s, int | float) or not cell.max_cell_s > 0:
        raise UsageError(f"grid: max_cell_s is {cell.max_cell_s!r}; it must be a positive number of seconds")
    if wrong := argument_values.problems(cell.arguments, cell.ds_config):
        raise UsageError(f"grid: {'; '.join(wrong)}")


def _check_peer(cell: Cell) -> None:
    """Peers have no place for some arguments: found here, before a sweep has taken the cards."""
    if cell.ds_config == "auto":
        raise UsageError(f"grid: runner {cell.runner} cannot choose a ds_config by itself: name one, or exclude auto there")
    mine = [name for name in _BIGTRAINS if cell.arguments.get(name) not in (None, False, [])]
    mine += ["packing"] if cell.arguments.get("packing", "none") != "none" else []
    mine += ["attn_implementation auto"] if cell.arguments.get("attn_implementation") == "auto" else []
    if mine:
        raise UsageError(f"grid: {mine[0]} is bigtrain's own: runner {cell.runner} would pass over it; exclude it there")
    optim = cell.arguments.get("optim", PEER_OPTIMIZERS[0])
    if optim not in PEER_OPTIMIZERS:
        raise UsageError(
            f"grid: optim {optim} is bigtrain's own: give the cells of runner {cell.runner} one of {', '.join(PEER_OPTIMIZERS)}, "
            "or exclude it there"
        )


def labels(cells: Sequence[Cell]) -> list[str]:
    """A short name for each cell: the values in which the cells of this grid differ."""
    return [text or cells[0].ds_name for text in differing([cell.settings() for cell in cells])]


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of these settings, in words, the values in which they differ."""
    names = list(dict.fromkeys(name for one in settings for name in one))
    varying = [n for n in names if len({json.dumps(one.get(n), default=str) for one in settings}) > 1]
    return [", ".join(word(n, one[n]) for n in varying if one.get(n) is not None) for one in settings]


_WORDS = {
    "per_device_train_batch_size": "mb", "gradient_accumulation_steps": "ga", "seq_len": "seq", "num_gpus": "gpus",
    "gradient_checkpointing": "ckpt", "checkpoint_blocks": "blocks", "checkpointing_policy": "keep", "mlp_tile_tokens": "tile", "leaf_blocks": "leafs",
    "use_liger_kernel": "liger", "gpu_memory_cap": "cap",
    "torch_compile": "compile",
}  # fmt: skip


def word(name: str, value: Any) -> str:
    """A setting for a label."""
    if isinstance(value, bool):
        return _WORDS.get(name, name) if value else f"no {_WORDS.get(name, name)}"
    if name in ("model_name_or_path", "ds_config", "runner", "optim"):
        return str(value).removeprefix(shapes.PREFIX).rstrip("/").split("/")[-1]
    return f"{_WORDS.get(name, name)} {value}"
