"""Resolving steps: precision, batch, optimizer, schedule, clipping, activation checkpointing."""

from __future__ import annotations

from typing import Any

from bigtrain.config.batch import ACCUMULATION, GLOBAL, MICRO
from bigtrain.config.resolve_steps import AUTO, Source, Work
from bigtrain.config.rules_run import SAME_OPTIM, SAME_SCHEDULE, SCHEDULE_NAMES, optim_name, run_owns_optimizer, solved
from bigtrain.config.rules_training import dtype_name
from bigtrain.config.run import DEFAULTS
from bigtrain.config.structure import params_key

DEEPSPEED_TYPES = {"adamw": "AdamW", "muon": "Muon", "lion": "Lion", "lamb": "Lamb", "adagrad": "Adagrad"}
"""Optimizers that DeepSpeed can build from the file; others are built in code."""


def precision(work: Work) -> None:
    """bf16 on or off, said in the file; leftovers of fp16 removed."""
    if work.get("bfloat16") is not None:
        work.set("bf16", work.config.pop("bfloat16"), "file", "bfloat16 is the old name of the section")
    value = work.get("bf16.enabled")
    said = work.run.bf16
    if value in (None, AUTO):
        if said is not None:
            work.set("bf16.enabled", said, "flag", "--bf16")
        elif value == AUTO:
            work.set("bf16.enabled", True, "default", '"auto": bf16 is what bigtrain trains in; DeepSpeed reads it off')
        else:
            work.set("bf16.enabled", False, "default", "the file has no bf16: fp32, as DeepSpeed would")
    if work.get("fp16") is not None:
        work.drop("fp16", "default", "bf16 and fp32 need no loss scaling")
    work.know(bf16=bool(work.get("bf16.enabled")))


def accumulation_dtype(work: Work) -> None:
    """fp32 gradient accumulation wherever DeepSpeed 0.19.8 can do it (measured: tests/ranks/test_config.py).

    Stage 0: it cannot (NotImplementedError); the Engine's own optimizer does (engine/master.py). Stage 1: in fp32, but the sum is rounded to
    bf16 on its way through the reduction unless communication_data_type is fp32, which costs little there because
    stage 1 reduces once a step. Stages 2 and 3, with and without offload: in fp32. Not added beside bf16 master
    weights or ZenFlow, which bring their own arrangement.

    With a single micro step there is nothing to sum: both give the same bits (tests/ranks/test_engine_alone.py), and bf16
    saves 2 bytes x parameters / ranks at stages 2 and 3, 4 at stage 2 with offload. So it is bf16 then, whatever the file
    says.
    """
    path = "data_types.grad_accum_dtype"
    if not work.run.bf16:
        return
    special = work.get("bf16.bf16_master_weights_and_grads") is True or work.get("zero_optimization.zenflow")
    if work.ctx.stage in (2, 3) and work.run.accumulation == 1 and not special:
        work.set(path, "bf16", "default", "one micro step: nothing to sum, so the same bits for less memory")
    elif not work.open(path):
        short = dtype_name(work.get(path))  # of four spellings the one that everybody else looks for
        work.set(path, short, "file", f"micro steps add up in {short}")
    elif work.ctx.stage == 0:
        work.drop(path, "default", "not possible at stage 0")
        work.say(path, "fp32", "default", "stage 0: by bigtrain's Engine; DeepSpeed alone adds up in bf16 there")
    elif special:
        work.say(path, "bf16", "default", "bf16 master weights or ZenFlow: left as DeepSpeed has it")
    else:
        work.set(path, "fp32", "default", "sums of many micro steps lose bits in bf16")
    if work.ctx.stage == 1 and dtype_name(work.get(path)) == "fp32" and work.open("communication_data_type"):
        work.set("communication_data_type", "fp32", "default", "or the fp32 sum is rounded to bf16 while reduced")


def batch(work: Work) -> None:
    """The three batch numbers."""
    triple = solved(work.ctx, work.world_size)
    for path, value in ((GLOBAL, triple.total), (MICRO, triple.micro), (ACCUMULATION, triple.accumulation)):
        who, why = triple.sources[path]
        source: Source = "file" if who.startswith("file") else "flag" if who.startswith("flag") else "default"
        if source == "default" and path == GLOBAL:
            source = "launcher"
            why = f"{triple.micro} x {triple.accumulation} x {triple.total // (triple.micro * triple.accumulation)} ranks"
        work.set(path, value, source, why if source in ("default", "launcher") else who)
    work.know(micro_batch=triple.micro, accumulation=triple.accumulation, global_batch=triple.total)


def optimizer(work: Work) -> None:
    """One optimizer, with every number said: the file's section, or the command line's choice."""
    said = SAME_OPTIM.get(work.run.optim or "", work.run.optim)
    in_file = optim_name(work.ctx)
    _optimizer_numbers(work)
    if in_file is None or (said and said != in_file and run_owns_optimizer(work.ctx)):
        name = said or DEFAULTS.optim or "adamw"
        source: Source = "flag" if said else "default"
        why = "the file's section is all auto, so the run chooses" if in_file else "the file has no optimizer"
        work.config.pop("optimizer", None)
        if name in DEEPSPEED_TYPES:
            work.set("optimizer", {"type": DEEPSPEED_TYPES[name], "params": {}}, source, why)
        else:
            work.say("optimizer.type", name, source, f"{why}; built in code, DeepSpeed cannot build it from a file")
    else:
        name, same = in_file, "; --optim says the same" if said else ""
        work.say("optimizer.type", work.get("optimizer.type"), "file", f"as written{same}")
    work.know(optim=name)
    if "optimizer" in work.config:
        _optimizer_params(work)


def _optimizer_numbers(work: Work) -> None:
    """Decide the numbers first: the section may be replaced below."""
    lr, source, why = work.pick("learning_rate", "optimizer.params.lr", "scheduler.params.warmup_max_lr")
    work.say("learning_rate", lr, source, why)
    eps, source, why = work.pick("adam_epsilon", "optimizer.params.eps")
    work.say("adam_epsilon", eps, source, why)
    decay, source, why = work.pick("weight_decay", "optimizer.params.weight_decay")
    work.say("weight_decay", decay, source, why)
    betas = work.get("optimizer.params.betas")
    if isinstance(betas, list | tuple):
        work.say("betas", list(betas), "file", "as written at optimizer.params.betas")
    else:
        first, source, why = work.pick("adam_beta1")
        second, source_2, _ = work.pick("adam_beta2")
        betas = [first, second]
        work.say("betas", betas, "flag" if "flag" in (source, source_2) else "default", why)
    work.know(learning_rate=lr, adam_epsilon=eps, weight_decay=decay, adam_beta1=betas[0], adam_beta2=betas[1])


def _optimizer_params(work: Work) -> None:
    """Write the numbers into the section: all that this optimizer takes, and any "auto" it holds."""
    run = work.run
    values = {"lr": run.learning_rate, "betas": [run.adam_beta1, run.adam_beta2], "eps": run.adam_epsilon,
              "weight_decay": run.weight_decay}  # fmt: skip
    body = work.config["optimizer"]
    params = body.setdefault("params", {})
    takes = params_key("optimizer", body)
    for key, value in values.items():
        known_to_take = takes.lookup(key) and not takes.open
        if params.get(key) == AUTO or (key not in params and (known_to_take or key == "lr")):
            params[key] = value
    for key, value in (("muon_lr", run.learning_rate), ("adam_lr", run.learning_rate), ("momentum", 0.95)):
        if params.get(key) == AUTO:
            work.set(f"optimizer.params.{key}", value, "default", "the learning rate" if "lr" in key else "usual value")


def schedule(work: Work) -> None:
    """The learning-rate schedule: the file's section completed, or the program's own."""
    run = work.run
    warmup, source, why = work.pick("warmup_steps", "scheduler.params.warmup_num_steps")
    if run.warmup_steps is not None:
        warmup = run.warmup_steps  # DeepSpeed needs at least 1 where the command line may say 0
    total, total_source, total_why = work.pick("total_steps", "scheduler.params.total_num_steps")
    kind = work.get("scheduler.type")
    named = SAME_SCHEDULE.get(run.lr_scheduler_type or "", run.lr_scheduler_type)
    if kind is None:
        name = named or DEFAULTS.lr_scheduler_type
        work.say("lr_scheduler_type", name, "flag" if named else "default", "the file has no scheduler; built in code")
    else:
        name = SCHEDULE_NAMES.get(kind, kind)
        work.say("scheduler.type", kind, "file", f"the schedule called {name}")
    work.say("warmup_steps", int(warmup), source, why)
    if total is not None:
        work.say("total_steps", int(total), total_source, total_why)
    work.know(lr_scheduler_type=name, warmup_steps=int(warmup), total_steps=None if total is None else int(total))
    if kind in SCHEDULE_NAMES:
        _schedule_params(work)


def _schedule_params(work: Work) -> None:
    run, base = work.run, "scheduler.params."
    takes = params_key("scheduler", work.config["scheduler"]).keys
    values: dict[str, tuple[Any, str]] = {
        "warmup_min_lr": (0.0, "warm-up starts at 0"),
        "warmup_max_lr": (run.learning_rate, "the learning rate; DeepSpeed's own default would be 0.001"),
        "warmup_num_steps": (max(1, run.warmup_steps or 0), "the warm-up; DeepSpeed wants at least 1"),
        "total_num_steps": (run.total_steps, "the length of the run"),
        "warmup_type": ("linear", "not said; DeepSpeed's own default is log, bigtrain's warm-up is linear"),
    }
    for key, (value, why) in values.items():
        if key not in takes or not work.open(base + key):
            continue
        if value is None:
            work.refuse(base + key, work.get(base + key), "nothing says how many steps the run has",
                        "pass --max_steps (total_steps), or write a number")  # fmt: skip
        else:
            work.set(base + key, value, "default" if key == "warmup_type" else "flag", why)


def clipping(work: Work) -> None:
    """Always said: DeepSpeed clips at 1.0 when the key is missing."""
    value, source, why = work.pick("max_grad_norm", "gradient_clipping")
    work.set("gradient_clipping", float(value), source, why if value else f"{why}; 0 switches clipping off")
    work.know(max_grad_norm=float(value))


def activation_checkpointing(work: Work) -> None:
    """A block in the file is a wish; the model's own mechanism is switched on."""
    block = work.get("activation_checkpointing")
    if work.run.gradient_checkpointing is not None:
        work.say(
            "gradient_checkpointing", work.run.gradient_checkpointing, "flag", "--gradient_checkpointing or --checkpoint_blocks"
        )
        return
    wanted = block is not None
    why = "the file has an activation_checkpointing block" if wanted else "no block in the file"
    work.say("gradient_checkpointing", wanted, "file" if wanted else "default", why)
    work.know(gradient_checkpointing=wanted)
