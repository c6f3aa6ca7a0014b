"""LoRA with peft on a model that ZeRO-3 partitions: the adapter comes out in full shape, and peft loads it without DeepSpeed.

deepspeed launch/examples/lora.py MODEL_DIR TEXT OUT
"""

import argparse
import sys

try:
    from peft import LoraConfig, get_peft_model
except ImportError:
    sys.exit("peft is not installed; run: pip install -c constraints.txt -e '.[lora]'")
from transformers import AutoTokenizer

from bigtrain import ranks
from bigtrain.data import SampleOrder, StepLoader, build_rows, load_source, plan_steps, prepare_isolation
from bigtrain.engine import Engine
from bigtrain.models import build_model, edit_model
from bigtrain.weights import export_adapter
from bigtrain.zero import init_distributed


def main(model_dir: str, text: str, out: str, steps: int = 10) -> None:
    init_distributed()
    config = "ds_configs/zero3_offload.json"
    rows = build_rows(load_source(text), AutoTokenizer.from_pretrained(model_dir), seq_len=128)
    plan = plan_steps(len(rows), micro_batch=4, accumulation=1, world_size=ranks.world_size(), max_steps=steps)
    base = build_model(model_dir, ds_config=config)
    prepare_isolation(base, "isolated")
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = edit_model(base, lambda whole: get_peft_model(whole, lora))  # peft sees full shapes in there
    engine = Engine(model, ds_config=config, learning_rate=2e-4, total_steps=steps, micro_batch=4, accumulation=1)
    for micro_batches in StepLoader(rows, SampleOrder(len(rows), seed=0), plan, engine.rank, engine.world_size):
        result = engine.train_step(micro_batches)
        if ranks.is_main():
            print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
    engine.save_checkpoint(out)  # to go on from: holds the adapter's state, and the base model once
    export_adapter(engine.module, f"{out}/adapter")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a LoRA adapter on a text, with a loop of your own.")
    parser.add_argument("model_dir", help="a Hugging Face folder with weights and tokenizer")
    parser.add_argument("text", help="what to train on: plain text, JSON Lines, Parquet or Arrow")
    parser.add_argument("out", help="the adapter goes to OUT/adapter")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # from the deepspeed launcher
    told = parser.parse_args()
    main(told.model_dir, told.text, told.out)
