"""Makes build/typing/torch_mlc, where the rooms lie as they lie once installed, for type checkers.

The folders stand at the root of the repository (see setup.py), which mypy cannot map by itself.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("ir", "scheduler", "codegen", "runtime", "dynamo_backend")


def make() -> Path:
    """Link every room and the public face into build/typing/torch_mlc; returns build/typing."""
    tree = ROOT / "build" / "typing"
    package = tree / "torch_mlc"
    package.mkdir(parents=True, exist_ok=True)
    wanted = {name: ROOT / name for name in ROOMS}
    wanted |= {path.name: path for path in (ROOT / "src" / "torch_mlc").iterdir() if path.name != "__pycache__"}
    for old in package.iterdir():
        old.unlink()
    for name, path in wanted.items():
        (package / name).symlink_to(os.path.relpath(path, package))
    return tree


if __name__ == "__main__":
    print(make())
