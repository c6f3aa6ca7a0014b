"""Run a grid of training runs and report speed and memory, predicted beside measured:

    python launch/benchmark.py launch/grids/cpu_smoke.yaml --output_dir out/bench

The same as `bigtrain bench`; `--help` lists the options, bigtrain/bench/grid.py says what a grid file holds.
"""

import sys

from bigtrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
