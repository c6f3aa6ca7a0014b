"""A peer for sweeps: transformers.Trainer with the same DeepSpeed JSON. Nothing of bigtrain.

python hf_trainer.py INSTRUCTIONS.json, one process a rank; launch/benchmark.py writes the file and starts the ranks.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo  # before zero.Init changes torch's constructors: transformers would import it inside
from measure import Recorder, Rows, end, instructions, refuse, take_card, world_size
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

OPTIM = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}


class Record(TrainerCallback):
    """A row whenever the Trainer says a step's loss, that is after every step."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._recorder.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "loss" in logs:
            self._recorder.step(float(logs["loss"]))


def training_arguments(told: dict[str, Any]) -> TrainingArguments:
    """The cell's values under the Trainer's names."""
    run, config = told["run"], dict(told["ds_config"])
    if run["optim"] != "adamw":
        config.pop("optimizer", None)  # else the file's optimizer would be used, whatever --optim says
    config.pop("scheduler", None)
    return TrainingArguments(
        output_dir=told["output_dir"],
        deepspeed=config,
        per_device_train_batch_size=run["micro_batch"],
        gradient_accumulation_steps=run["accumulation"],
        max_steps=told["steps"],
        learning_rate=run["learning_rate"],
        optim=OPTIM[run["optim"]],
        bf16=told["ds_config_resolved"]["bf16"]["enabled"],
        gradient_checkpointing=bool(run.get("gradient_checkpointing")),
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=bool(told["arguments"].get("use_liger_kernel")),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def main() -> None:
    """Train on random rows; one line of numbers a step."""
    told = instructions()
    run, args = told["run"], told["arguments"]
    if run["optim"] not in OPTIM:
        refuse(f"optim {run['optim']} is bigtrain's own; this peer has {', '.join(OPTIM)}")
    if args.get("freeze"):
        refuse("this peer freezes nothing")
    device = take_card(args.get("gpu_memory_cap"))
    if device.type == "cpu":
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")  # the Trainer's own start comes too late for stage 3
    training = training_arguments(told)  # keeps the DeepSpeed config alive, so that stage 3 partitions while building
    config = AutoConfig.from_pretrained(told["model"])
    config.use_cache = False
    dtype = torch.bfloat16 if training.bf16 else torch.float32
    attention = args.get("attn_implementation", "sdpa")
    whole = told["ds_config_resolved"]["zero_optimization"]["stage"] < 3  # stage 3 is built in slices by transformers
    with device if whole else nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    tokens = run["micro_batch"] * run["accumulation"] * world_size() * int(args["seq_len"])
    recorder = Recorder(told["output_dir"], tokens)
    Trainer(model=model, args=training, train_dataset=Rows(told["rows"]), callbacks=[Record(recorder)]).train()


if __name__ == "__main__":
    main()
    end()
