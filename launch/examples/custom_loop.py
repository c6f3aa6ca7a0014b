"""Your own training loop for a language model, in DeepSpeed's idiom.

deepspeed launch/examples/custom_loop.py TEXT TOKENIZER_DIR OUT
"""

import argparse

from transformers import AutoTokenizer

from bigtrain import ranks
from bigtrain.data import SampleOrder, StepLoader, build_rows, load_source, plan_steps, prepare_isolation
from bigtrain.engine import Engine
from bigtrain.models import build_model
from bigtrain.zero import init_distributed


def main(text: str, tokenizer_dir: str, out: str, steps: int = 10) -> None:
    init_distributed()
    config = "ds_configs/zero3_offload.json"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    rows = build_rows(load_source(text), tokenizer, seq_len=128)
    plan = plan_steps(len(rows), micro_batch=4, accumulation=2, world_size=ranks.world_size(), max_steps=steps)
    model = build_model("preset:llama-tiny", ds_config=config, vocab_size=len(tokenizer))
    prepare_isolation(model, "isolated")
    engine = Engine(model, ds_config=config, learning_rate=3e-3, total_steps=steps, micro_batch=4, accumulation=2)
    for micro_batches in StepLoader(rows, SampleOrder(len(rows), seed=0), plan, engine.rank, engine.world_size):
        for batch in micro_batches:
            loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
            engine.backward(loss)
            result = engine.step()  # acts on the second micro batch, None before
        if result and ranks.is_main():
            print(f"step {result.step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}", flush=True)
    engine.export(f"{out}/model", tokenizer=tokenizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny Llama on a text, with a loop of your own.")
    parser.add_argument("text", help="what to train on: plain text, JSON Lines, Parquet or Arrow")
    parser.add_argument("tokenizer_dir", help="a tokenizer, for example out/stdlib/tokenizer")
    parser.add_argument("out", help="the model goes to OUT/model")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # from the deepspeed launcher
    told = parser.parse_args()
    main(told.text, told.tokenizer_dir, told.out)
