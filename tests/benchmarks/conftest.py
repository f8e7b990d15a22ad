"""The benchmarks are scripts of the checkout and not installed, so the tests find them by the checkout's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
