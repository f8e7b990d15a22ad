"""The modules of this folder are imported by its tests, by the names that ``python -m tests.fuzz`` has for them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
