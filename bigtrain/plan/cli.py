"""`bigtrain plan`: what fits, where every byte goes, which configuration is the fastest. Exit 3: it does not fit."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bigtrain import defaults, shapes
from bigtrain.errors import DoesNotFitError, UsageError
from bigtrain.plan.cards import card_name, peak_bf16_flops
from bigtrain.plan.choose import WANTED, Candidate, Choice, choose, rows_per_rank, search_settings, usual_optimizers
from bigtrain.plan.command import auto_command, command_for
from bigtrain.plan.families import contradictions, position_limit
from bigtrain.plan.family_kept import attention_of, liger_for
from bigtrain.plan.family_others import VISION_LANGUAGE
from bigtrain.plan.flags import MAX, add_flags, settle_words
from bigtrain.plan.hardware import Hardware
from bigtrain.plan.impossible import refuse_wrong_types
from bigtrain.plan.inputs import PlanInput, plan_input
from bigtrain.plan.judge import time_on
from bigtrain.plan.leaf_choice import LeafChoice, as_said, choose_leafs, leafed
from bigtrain.plan.longest import length_text, longest
from bigtrain.plan.machine import LOCK_LEAST_BYTES, expandable_segments, gpu_memory, host_memory, parse_bytes, show_bytes
from bigtrain.plan.predict import Plan, predict
from bigtrain.plan.roofline import Rates, rates_from, speed_numbers, stored_rates
from bigtrain.plan.settled import buffers_are_open, settled
from bigtrain.plan.show import assumed_text, choice_text, measured_text, plan_text
from bigtrain.plan.spilled import AUTO, asked_share
from bigtrain.plan.states import layout_name

DOES_NOT_FIT = DoesNotFitError.exit_code
Assumed = Mapping[str, tuple[Any, str]]  # name: value, the flag that changes it


def add_parsers(subparsers: Any) -> None:
    """Register the verb `plan`; the parser sets `run`, a function from args to exit code."""
    p = subparsers.add_parser(
        "plan",
        help="memory and speed of a job before it is launched; exit 3: does not fit",
        usage="bigtrain plan --model DIR|preset:NAME [--FLAG VALUE ...]",  # all flags stand below it, and would above each error
    )
    add_flags(p)
    p.set_defaults(run=run)


def model_config(name: str) -> dict[str, Any]:
    """A config by `preset:NAME`, a folder with config.json, or that file.

    Raises:
        UsageError: none of these is there, or it is not a config.
    """
    path = Path(name)
    if shapes.is_preset(name) or (not path.exists() and name.lower() in shapes.names()):
        return shapes.config_dict(name)
    if not path.exists():
        near = difflib.get_close_matches(name.lower(), shapes.names(), n=3)
        known = " or ".join(shapes.PREFIX + one for one in near) or f"{shapes.PREFIX}NAME"
        raise UsageError(
            f"there is no folder or file '{name}': give a folder with its config.json (no hub is asked), or a named shape, {known}"
        )
    config = shapes.read_config(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f"the model config of '{name}' has model_type = {kind!r}: the name of a family is needed")
    refuse_wrong_types(config)
    if kind in VISION_LANGUAGE and not config.get("text_config") and "hidden_size" not in config:
        raise UsageError(
            f"the model config of '{name}' (model_type '{kind}') has no text_config: the sizes of its language model are needed"
        )
    return config


def _input(args: argparse.Namespace, config: dict[str, Any] | None, ds_config: dict[str, Any], run: Any) -> PlanInput:
    """The command line as an input; --auto searches from it. `run`: the values of the ds_config's run, None without a file."""
    recompute = args.recompute if run is None else run.gradient_checkpointing
    if args.auto:
        recompute = recompute is not False
    values: dict[str, Any] = {
        "world_size": args.gpus, "gpus_per_node": args.gpus_per_node,
        "seq_len": defaults.seq_len(None if args.seq_len == MAX else args.seq_len, position_limit(config) if config else None),
        "mlp_tile_tokens": args.mlp_tile_tokens,
        "checkpointing": args.policy if recompute or (recompute is None and defaults.GRADIENT_CHECKPOINTING) else "none",
        "checkpoint_blocks": None if args.blocks == AUTO else args.blocks,
        **(liger_for((config or {}).get("model_type"), args.device) if args.kernels == "liger" else {"kernels": "hf"}),
        "loss": args.loss, "device": args.device,
        "attention": _attention(config or {}, args, recompute),
        "micro_batch": args.micro_batch if run is None else run.micro_batch,
        "accumulation": args.accumulation if run is None else run.accumulation,
        "optimizer": (args.optim or defaults.OPTIM) if run is None else run.optim,
        "card_flops": peak_bf16_flops(card_name()) if args.device == "cuda" else None,
        "frozen": tuple(args.freeze), "expandable": expandable_segments(),
        "drawn": shapes.is_preset(args.model),
    }  # fmt: skip
    values = {k: v for k, v in values.items() if v is not None}
    pairs = shapes.read_json(args.shapes, "the list of shapes") if args.shapes else None
    base = plan_input(config, shapes=pairs, ds_config=ds_config, **values)
    return _with_global_batch(base, args) if args.global_batch and not args.auto else base


def _attention(config: Mapping[str, Any], args: argparse.Namespace, recompute: bool | None) -> str:
    return attention_of(
        "auto", "isolated", args.device, config.get("model_type"), seq_len=None if args.seq_len == MAX else args.seq_len,
        selective=args.policy == "selective" and recompute is not False, dropout=config.get("attention_dropout") or 0.0,
    )  # fmt: skip


def _assumed(args: argparse.Namespace, base: PlanInput, resolved: Any) -> dict[str, tuple[Any, str]]:
    """What nobody said, as launch/train.py would have it: name to (value, the flag that changes it)."""
    nobody = {d.path for d in resolved.decisions if d.source == "default"} if resolved is not None else None

    def is_open(said: Any, path: str) -> bool:
        return said is None and (nobody is None or path in nobody)

    rows: dict[str, tuple[Any, str]] = {}
    if args.seq_len is None:
        rows["seq_len"] = base.seq_len, "--seq_len N"
    if args.auto:
        if not (args.global_batch or args.micro_batch or args.accumulation):
            per_rank = rows_per_rank(None, None)
            rows["rows a step and rank"] = per_rank, f"--global_batch {per_rank * base.world_size}"
        return rows
    if is_open(args.micro_batch, "train_micro_batch_size_per_gpu"):
        rows["micro_batch"] = base.micro_batch, "--micro_batch N"
    if is_open(args.accumulation or args.global_batch, "gradient_accumulation_steps"):
        rows["accumulation"] = base.accumulation, "--accumulation N"
    if is_open(args.recompute, "gradient_checkpointing"):
        rows["checkpointing"] = base.checkpointing, "--gradient_checkpointing"
    if is_open(args.optim, "optimizer.type"):
        rows["optimizer"] = base.optimizer, "--optim NAME"
    if resolved is None and args.stage is None:
        rows["stage"] = base.settings.stage, "--stage N or --ds_config FILE"
    return rows


def _plain_config(args: argparse.Namespace) -> dict[str, Any]:
    """The ds_config that --stage and --offload stand for: fp32 gradient accumulation, as in the presets."""
    zero: dict[str, Any] = {"stage": 3 if args.stage is None else args.stage, "overlap_comm": True}
    if args.offload in ("optimizer", "all"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if args.offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {"zero_optimization": zero, "data_types": {"grad_accum_dtype": "fp32"}}


def _with_global_batch(base: PlanInput, args: argparse.Namespace) -> PlanInput:
    per_micro = base.world_size * base.micro_batch
    if args.accumulation is not None or args.global_batch % per_micro:
        raise UsageError(
            f"--global_batch {args.global_batch} is not {base.world_size} ranks x micro batch {base.micro_batch} x a "
            "whole accumulation: leave --accumulation out and give a multiple"
        )
    return base.but(accumulation=args.global_batch // per_micro)


def _hardware(args: argparse.Namespace) -> Hardware:
    said = args.gpu_memory is not None
    gpu = parse_bytes(args.gpu_memory, "--gpu_memory") if said else min(gpu_memory(), default=None)
    if args.host_memory is not None:
        return Hardware(gpu, parse_bytes(args.host_memory, "--host_memory"), _rates(args))
    found = host_memory()
    return Hardware(gpu, found.usable_bytes if found else None, _rates(args))


def _taken(args: argparse.Namespace, hardware: Hardware) -> dict[str, int]:
    """Bytes that are this machine's, by the flag that nobody gave: whoever plans for another machine must see them."""
    found = {"--gpu_memory": hardware.gpu_bytes if args.device == "cuda" else None, "--host_memory": hardware.host_bytes}
    return {flag: size for flag, size in found.items() if size is not None and getattr(args, flag[2:]) is None}


def _rates(args: argparse.Namespace) -> Rates:
    if not args.calibration:
        return stored_rates(args.device) or Rates()
    if args.calibration == "none":
        return Rates()
    values = shapes.read_json(args.calibration, "the calibration")
    if not isinstance(values, dict):
        raise UsageError(f"the calibration '{args.calibration}' is not a JSON object")
    return rates_from(values)


def _choice(args: argparse.Namespace, base: PlanInput, hardware: Hardware) -> Choice:
    wanted = args.optimizers.split(",") if args.optimizers else [args.optim] if args.optim else usual_optimizers(args.device)
    names = tuple(layout_name(name) for name in wanted)
    base = base.but(settings=search_settings(base.geometry.hidden))
    micro, accumulation = args.micro_batch, args.accumulation
    return choose(
        base, hardware, optimizers=names, micro_batch=micro, accumulation=accumulation, recompute=None if args.blocks == AUTO else args.recompute,
        share=asked_share(args.offload_gradients), leaf_blocks=args.leaf_blocks, global_batch=args.global_batch or base.world_size * rows_per_rank(micro, accumulation),
        wanted=max(WANTED, args.measure or 0),
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Plan or choose, print it, and say by the exit code whether it fits."""
    settle_words(args)
    share = asked_share(args.offload_gradients)
    config = model_config(args.model) if args.model else None
    resolved = args.reader(args, config) if args.ds_config is not None else None
    ds_config = _plain_config(args) if resolved is None else resolved.engine_config()
    base, hardware = _input(args, config, ds_config, resolved and resolved.run), _hardware(args)
    assumed = _assumed(args, base, resolved)
    _warn(base, config or {})
    if not args.auto:
        base, buffers = base.but(offload_gradients=share or 0.0), buffers_are_open(ds_config)
        base = as_said(base, args.leaf_blocks)
        settle = partial(settled, hardware=hardware, share=share is None, blocks=args.blocks == AUTO)
        if args.seq_len == MAX:  # buffers take what is left
            base = longest(base, hardware, position_limit(config) if config else None, partial(settle, buffers=False))
            print(f"--seq_len {MAX}: {length_text(base.seq_len, position_limit(config) if config else None)}", file=sys.stderr)
        base = settle(base, buffers=buffers)
        leafs = choose_leafs(base, hardware) if args.leaf_blocks == AUTO else None
        if leafs is not None:
            base = leafed(base) if leafs.on else base
        return _print_plan(args, predict(base, gpu_memory_bytes=hardware.gpu_bytes), hardware, assumed, leafs)
    return _print_choice(args, _choice(args, base, hardware), assumed)


def _print_choice(args: argparse.Namespace, choice: Choice, assumed: Assumed) -> int:
    """The ladder, and the plan of the chosen one as launch/train.py runs it."""
    hardware, measured = choice.hardware, _measured(args, choice)
    best = _fastest(choice, measured)
    plan = predict(best.input, gpu_memory_bytes=hardware.gpu_bytes) if best is not None else None
    if args.json:
        said = {**choice.to_json(), **_values(assumed), "plan": plan.to_json() if plan else None}
        print(json.dumps({**said, **({"measured": measured} if measured else {})}, indent=2))
    else:
        print(assumed_text(assumed, _taken(args, hardware)) + choice_text(choice))
        if best is not None and plan is not None:
            print(f"\n{measured_text(measured)}chosen: {best.describe()}\n")
            print(plan_text(plan, hardware, args.formulas))
            if args.leaf_blocks == AUTO:
                _print_leafs(choose_leafs(best.input.but(leaf_classes=()), hardware))
            _warn_about_locks(plan)
            if args.model and not measured:
                print(f"to train so (the words in capitals are yours to fill in):\n{command_for(args, best.input)}")
    return 0 if choice.best else DOES_NOT_FIT


def _values(assumed: Assumed) -> dict[str, Any]:
    return {"assumed": {name: value for name, (value, _) in assumed.items()}}


def _measured(args: argparse.Namespace, choice: Choice) -> list[dict[str, Any]]:
    """Rows of the best candidates that ran here, fastest first; see `bigtrain.bench.measure`."""
    if not args.measure or not choice.fitting:
        return []
    return args.measurer(args.model, choice.fitting[: args.measure])


def _fastest(choice: Choice, measured: list[dict[str, Any]]) -> Candidate | None:
    ran = [row for row in measured if row["tokens_per_s"]]
    return choice.fitting[ran[0]["candidate"]] if ran else choice.best


def _warn(base: PlanInput, config: dict[str, Any]) -> None:
    limit, warnings, world, host = position_limit(config), contradictions(config), base.world_size, base.ranks_per_node
    if limit is not None and base.seq_len > limit:
        warnings.append(
            f"--seq_len {base.seq_len} is above the model's max_position_embeddings {limit}: launch/train.py refuses it"
        )
    if world % host:
        warnings.append(f"{world} ranks on hosts of {host}: one host has {world % host}; a full one is planned")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _warn_about_locks(plan: Plan) -> None:
    """CUDA's own pinning does not count against the limit, but one of 64 KiB was seen to stop it, looking like a full GPU (DeepSpeed#2977)."""
    found, pinned = host_memory(), plan.host_pinned_bytes
    if found is not None and found.lockable_bytes is not None and found.lockable_bytes < min(LOCK_LEAST_BYTES, pinned):
        print(
            f"warning: a rank pins {show_bytes(pinned)}, the lock limit here (ulimit -l) is {show_bytes(found.lockable_bytes)}, with which some "
            "drivers pin nothing and say 'CUDA out of memory': raise it, or set pin_memory to false in the offload blocks"
        )


def _print_leafs(leafs: LeafChoice | None) -> None:
    print("" if leafs is None else f"--leaf_blocks auto: {leafs.text()}\n", end="")


def _print_plan(args: argparse.Namespace, plan: Plan, hardware: Hardware, assumed: Assumed, leafs: LeafChoice | None) -> int:
    fits = hardware.holds(plan)
    if args.json:
        speed = speed_numbers(plan.input.device, time_on(plan, hardware))
        said: dict[str, Any] = {"gpu_memory_bytes": hardware.gpu_bytes, "host_memory_bytes": hardware.host_bytes, "fits": fits}
        said |= {"leaf_blocks": leafs._asdict()} if leafs else {}
        print(json.dumps({**plan.to_json(), **_values(assumed), **speed, **said}, indent=2))
    else:
        print(assumed_text(assumed, _taken(args, hardware)) + plan_text(plan, hardware, args.formulas))
        _print_leafs(leafs)
        if not fits:
            print(f"what would fit: {auto_command(args, plan.input, assumed)}")
        _warn_about_locks(plan)
    return 0 if fits else DOES_NOT_FIT
