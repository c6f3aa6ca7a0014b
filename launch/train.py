"""Train a model. The same script under every launcher, and alone:

    deepspeed launch/train.py --ds_config ds_configs/zero3_offload.json --model_name_or_path DIR ...
    torchrun --standalone --nproc_per_node 8 launch/train.py ...
    python launch/train.py run.yaml

All of it is in bigtrain/train.py; `--help` lists the flags.
"""

from bigtrain.stopping import end_process
from bigtrain.train import main

# SuperOffload starts worker processes that import this file again: without the guard they would train too.
if __name__ == "__main__":
    end_process(main())
