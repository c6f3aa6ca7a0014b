"""`python -m bigtrain` is the `bigtrain` command."""

import sys

from bigtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
