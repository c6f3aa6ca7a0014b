"""A peer for sweeps: the plain loop of DeepSpeed's tutorials around a transformers model. Nothing of bigtrain.

python raw_deepspeed.py INSTRUCTIONS.json, one process a rank; launch/benchmark.py writes the file and starts the ranks.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch._dynamo  # before zero.Init changes torch's constructors: transformers would import it inside
from measure import Recorder, Rows, end, instructions, rank, refuse, take_card, world_size
from transformers import AutoConfig, AutoModelForCausalLM


def build(told: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """The model with random weights in bf16; at stage 3 partitioned by transformers' own way."""
    args, config = told["arguments"], AutoConfig.from_pretrained(told["model"])
    config.use_cache = False
    attention = args.get("attn_implementation", "sdpa")
    if args.get("use_liger_kernel"):
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

        _apply_liger_kernel(config.model_type)
    dtype = torch.bfloat16 if told["ds_config_resolved"]["bf16"]["enabled"] else torch.float32
    if told["ds_config_resolved"]["zero_optimization"]["stage"] == 3:
        from transformers.integrations import HfDeepSpeedConfig

        told["alive"] = HfDeepSpeedConfig(told["ds_config_resolved"])  # found through a weak reference
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    else:
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if told["run"].get("gradient_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def initialize(told: dict[str, Any], model: torch.nn.Module) -> Any:
    """deepspeed.initialize with the file's optimizer, or with bitsandbytes' where 8-bit states are asked for."""
    config, run = dict(told["ds_config_resolved"]), told["run"]
    config.pop("scheduler", None)
    more = {}
    if run["optim"] == "adamw_8bit":
        import bitsandbytes

        config.pop("optimizer", None)
        config["zero_allow_untested_optimizer"] = True
        more["optimizer"] = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=run["learning_rate"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **more)
    return engine


def main() -> None:
    """Train on random rows; one line of numbers a step."""
    told = instructions()
    run, args = told["run"], told["arguments"]
    if run["optim"] not in ("adamw", "adamw_8bit"):
        refuse(f"optim {run['optim']} is bigtrain's own; this peer has adamw and adamw_8bit")
    if args.get("freeze"):
        refuse("this peer freezes nothing")
    device = take_card(args.get("gpu_memory_cap"))
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    engine = initialize(told, build(told, device))
    rows, micro, accumulation = Rows(told["rows"]), run["micro_batch"], run["accumulation"]
    recorder = Recorder(told["output_dir"], micro * accumulation * world_size() * int(args["seq_len"]))
    recorder.start()
    for step in range(told["steps"]):
        for micro_step in range(accumulation):
            number = (step * accumulation + micro_step) * world_size() + rank()
            ids = rows.batch(number, micro).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        recorder.step(loss.item())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    end()
