"""`python -m bigtrain` is the `bigtrain` command."""

from bigtrain.cli import main
from bigtrain.stopping import end_process

if __name__ == "__main__":
    end_process(main())
