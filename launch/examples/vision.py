"""A model that is no language model: a convolutional encoder with BatchNorm learns to match a frozen one.

deepspeed launch/examples/vision.py TEACHER.pt OUT      (a teacher with random weights is made where there is none)
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from bigtrain import ranks
from bigtrain.engine import Engine
from bigtrain.models import build_model, frozen_module, refuse_batchnorm_micro_batch_1
from bigtrain.zero import init_distributed

CONFIG = "ds_configs/zero2_offload.json"


def encoder(width: int) -> nn.Sequential:
    """Images [batch, 3, 32, 32] to features [batch, 32]."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 32),
    )  # fmt: skip


class Distilled(nn.Module):
    """A student and its frozen teacher; forward returns the loss."""

    def __init__(self, teacher_file: str):
        super().__init__()
        self.teacher = frozen_module(lambda: encoder(64), checkpoint=teacher_file)
        self.student = encoder(16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.student(images).float(), self.teacher(images).float())


def main(teacher_file: str, out: str, steps: int = 30) -> None:
    init_distributed()
    with ranks.main_first("making a teacher"):
        if not Path(teacher_file).exists():
            Path(teacher_file).parent.mkdir(parents=True, exist_ok=True)
            torch.save(encoder(64).state_dict(), teacher_file)
    model = build_model(Distilled, ds_config=CONFIG, teacher_file=teacher_file)
    refuse_batchnorm_micro_batch_1(model, 8)
    engine = Engine(model, ds_config=CONFIG, learning_rate=1e-2, total_steps=steps, micro_batch=8)
    pictures = torch.Generator().manual_seed(engine.rank)  # every rank sees pictures of its own
    for _ in range(steps):
        result = engine.train_step([{"images": torch.randn(8, 3, 32, 32, generator=pictures)}])
        if ranks.is_main():
            print(f"step {result.step}: loss {result.loss:.4f}", flush=True)
    engine.save_checkpoint(out, tag="last")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small convolutional network to match a frozen one.")
    parser.add_argument("teacher", help="its weights, TEACHER.pt; made with random weights where there is none")
    parser.add_argument("out", help="the checkpoint goes to OUT/last")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # from the deepspeed launcher
    told = parser.parse_args()
    main(told.teacher, told.out)
