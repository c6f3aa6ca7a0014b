"""The scripts of launch/ import each other as they do when one of them is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "launch"))
