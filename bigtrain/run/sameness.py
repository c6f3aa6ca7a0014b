"""What must be the same on every host before anything is built: versions, ds_config, and the content of files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from bigtrain import ranks, shapes
from bigtrain.data.files import expand
from bigtrain.errors import DataError, UsageError

logger = logging.getLogger(__name__)

LISTED = 12  # differences that a message shows in full
READ_BYTES = 8 << 20
# Files of a model or tokenizer folder that decide what is trained: weights, configs, vocabularies, code.
MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".pt", ".txt", ".model", ".jinja", ".py", ".gguf", ".tiktoken")


def refuse_different(args: Any, ds_config: Mapping[str, Any]) -> None:
    """Compare what decides the result between hosts. Collective; does nothing on one host.

    A file that all hosts see as the same one (a shared disk) is not read. Others are read whole, each host's files by all of
    its ranks together, and compared by their xxh3_128.

    Args:
        args: `bigtrain.run.arguments.TrainArguments`.
        ds_config: as it was read on this rank.

    Raises:
        UsageError: on every rank alike: what differs, and on which hosts.
    """
    hosts = _hosts()
    if len(set(hosts)) == 1:
        return
    began = time.monotonic()
    with ranks.together("comparing the hosts"):
        mine = {**installed(), **_flat("ds_config", ds_config)}
    everyone = ranks.all_gather_object((mine, settings()))
    found = differences([(host, values) for host, (values, _) in zip(hosts, everyone)], "absent")
    unequal = differences([(host, values) for host, (_, values) in zip(hosts, everyone)], "not set")
    if unequal and ranks.is_main():
        logger.warning("the hosts' environments differ, which may be meant:\n  %s", "\n  ".join(unequal[:LISTED]))
    found += _different_files(hosts, _file_lists(args))
    if not found:
        logger.info("%d hosts: same versions, configs and files (%.1f s)", len(set(hosts)), time.monotonic() - began)
        return
    more = f"\n  and {len(found) - LISTED} more" if len(found) > LISTED else ""
    raise UsageError(
        "the hosts differ:\n  " + "\n  ".join(found[:LISTED]) + more + "\nNothing was built. Give every host the same packages "
        "(pip install -c constraints.txt) and files (a shared disk, or rsync --checksum)."
    )


def _hosts() -> list[str]:
    """The host of each rank, named: ranks of one host see the same files. Containers of one machine are hosts of their own."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        key = (name, machine, os.readlink("/proc/self/ns/mnt"))
        everyone = ranks.all_gather_object(key)
        distinct = list(dict.fromkeys(everyone))
        twice = {k[0] for k in distinct if sum(k[0] == other[0] for other in distinct) > 1}
        return [k[0] if k[0] not in twice else f"{k[0]} ({distinct.index(k) + 1})" for k in everyone]
    return ranks.all_gather_object(name)


def installed() -> dict[str, str]:
    """What of this Python decides results or must fit between ranks: packages, NCCL, CUDA, and this package's own source."""
    import importlib.metadata
    import platform

    import torch

    from bigtrain.versions import PACKAGES

    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in (*PACKAGES, "tokenizers", "triton", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[f"package {name}"] = importlib.metadata.version(name)
    if torch.version.cuda:
        found["CUDA of torch"] = torch.version.cuda
        with contextlib.suppress(Exception):
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    found["source of bigtrain"] = _short(xxhash.xxh3_128_hexdigest(b"".join(p.read_bytes() for p in sources)))
    return found


def settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that change how ranks talk. Interfaces and devices have other names on other hosts."""
    return {
        name: value for name, value in env.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_", "BIGTRAIN_")) and not name.endswith(("_IFNAME", "_HCA", "_HOST"))
    }  # fmt: skip


def _flat(prefix: str, value: Any) -> dict[str, str]:
    """Nested dicts as dotted keys."""
    if isinstance(value, Mapping) and value:
        return {k: v for name, inner in value.items() for k, v in _flat(f"{prefix}.{name}", inner).items()}
    return {prefix: json.dumps(value, sort_keys=True, default=str)}


def differences(told: Sequence[tuple[str, Mapping[str, str]]], absent: str) -> list[str]:
    """One line for each key whose value is not the same on all hosts: "KEY: VALUE on HOSTS; VALUE on HOSTS".

    Args:
        told: (host, its values), for each rank or host.
        absent: what to say where a host has no such key.
    """
    lines = []
    for key in dict.fromkeys(k for _, values in told for k in values):
        by_value: dict[str, dict[str, None]] = defaultdict(dict)
        for host, values in told:
            by_value[values.get(key, absent)][host] = None
        if len(by_value) > 1:
            lines.append(f"{key}: " + "; ".join(f"{value} on {_some(list(where))}" for value, where in by_value.items()))
    return lines


def _some(hosts: Sequence[str]) -> str:
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")


# ---------------------------------------------------------------- files


def _file_lists(args: Any) -> dict[str, list[Path]]:
    """Files of the run on this host, by the flag that names them. Collective, because reading folders may fail on one host."""
    with ranks.together("listing the files of model and data"):
        found = {flag: _model_files(getattr(args, flag)) for flag in ("model_name_or_path", "tokenizer_name_or_path")}
        for flag in ("train_data", "eval_data"):
            value = getattr(args, flag)
            paths = [value] if isinstance(value, str | Path) else value or ()
            found[flag] = sorted({file for path in paths for file in _data_files(str(path))})
    return found


def _model_files(name: str | None) -> list[Path]:
    """Files of a model folder."""
    if not name or shapes.is_preset(name):
        return []
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []  # a hub id: the ranks compare which snapshot they got (bigtrain.models.source)
    return sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in MODEL_SUFFIXES and not p.name.startswith("."))


def _data_files(path: str) -> list[Path]:
    """Files behind a file, folder or pattern; none where they cannot be listed, which reading them explains."""
    try:
        return expand(path)
    except DataError:
        return []


def _different_files(hosts: Sequence[str], lists: Mapping[str, Sequence[Path]]) -> list[str]:
    """Lines as of `differences`. Names and sizes first; content only of lists that are not one and the same everywhere.

    Lists travel as hashes: a data folder may hold a million files.
    """
    with ranks.together("looking at the files of model and data"):
        states = {flag: {str(path): path.stat() for path in files} for flag, files in lists.items()}
    sizes = {flag: {name: s.st_size for name, s in of_flag.items()} for flag, of_flag in states.items()}
    # A shared disk shows one inode with one change time, which nobody can set: no two copies agree in both.
    identity = {f: {n: (s.st_size, s.st_ino, s.st_ctime_ns) for n, s in of_flag.items()} for f, of_flag in states.items()}
    told = ranks.all_gather_object({f: (_hash(sizes[f]), _hash(identity[f])) for f in lists})
    other_sizes = [f for f in lists if any(t[f][0] != told[0][f][0] for t in told)]
    if other_sizes:
        shown = {f"{f}: {n}": f"{size} bytes" for f in other_sizes for n, size in sizes[f].items()}
        return _compare(hosts, shown if hosts.index(hosts[ranks.rank()]) == ranks.rank() else {})
    copies = {n: size for f in lists if any(t[f][1] != told[0][f][1] for t in told) for n, size in sizes[f].items()}
    return _compare(hosts, {f"{_flag_of(n, sizes)}: {n}": f"content {_short(d)}" for n, d in _digests(hosts, copies).items()})


def _flag_of(name: str, by_flag: Mapping[str, Mapping[str, int]]) -> str:
    return next(flag for flag, names in by_flag.items() if name in names)


def _compare(hosts: Sequence[str], mine: Mapping[str, str]) -> list[str]:
    """`differences` between hosts, of which each rank tells a part."""
    whole: dict[str, dict[str, str]] = {host: {} for host in hosts}
    for host, part in zip(hosts, ranks.all_gather_object(mine)):
        whole[host].update(part)
    return differences(list(whole.items()), "absent")


def _hash(value: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(value.items())).encode())


def _digests(hosts: Sequence[str], sizes: Mapping[str, int]) -> dict[str, str]:
    """xxh3_128 of this rank's share of the files `sizes`: the ranks of a host take turns, largest files first."""
    here = [r for r, host in enumerate(hosts) if host == hosts[ranks.rank()]]
    load = dict.fromkeys(here, 0)
    own = []
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        reader = min(here, key=lambda r: (load[r], r))
        load[reader] += sizes[name]
        if reader == ranks.rank():
            own.append(name)
    total = sum(sizes.values())
    if total > 4 << 30:
        logger.info("comparing %.1f GB of files, which are not on a shared disk, between the hosts", total / 1e9)
    with ranks.together("reading the files of model and data"):
        return {name: digest(Path(name)) for name in own}


def digest(path: Path) -> str:
    """xxh3_128 of a file's content, 32 hexadecimal digits; frees Python's lock while it hashes."""
    hashed = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            hashed.update(block)
    return hashed.hexdigest()


def _short(digest: str) -> str:
    return digest[:12]


# ---------------------------------------------------------------- the output folder


def refuse_split_output(folder: Path, saves: bool) -> None:
    """A checkpoint is one folder that every rank writes to. Collective; `folder` exists on the first host.

    Args:
        folder: the run's output folder.
        saves: the run writes checkpoints.

    Raises:
        UsageError: on every rank, if it does and some host has an output folder of its own; names the hosts.
    """
    without = _hosts_without(folder)
    if not without:
        return
    where = f"{_some(without)} {'does' if len(without) == 1 else 'do'} not see --output_dir {folder} of {socket.gethostname()}"
    if saves:
        raise UsageError(
            f"{ranks.broadcast_object(where)}: a checkpoint is one folder that every rank writes its part to. Put --output_dir on a "
            "disk that all hosts mount at the same path, or leave out --save_steps: then rank 0 alone writes, on the first host."
        )
    if ranks.is_main():
        logger.info("%s: everything is written on the first host", where)


def _hosts_without(folder: Path) -> list[str]:
    hosts = _hosts()
    if len(set(hosts)) == 1:
        return []
    # A name that nobody has looked for before: network file systems remember what was absent.
    mark = ranks.broadcast_object(f".seen-{os.getpid()}-{time.time_ns()}")
    ranks.main_decides(lambda: (folder / mark).touch(), "marking output_dir")
    seen = ranks.all_gather_object((folder / mark).exists())
    ranks.main_decides(lambda: (folder / mark).unlink(), "marking output_dir")
    return list(dict.fromkeys(host for host, sees in zip(hosts, seen) if not sees))
