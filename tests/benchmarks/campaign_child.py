"""A process in place of a campaign's, whose checks go wrong in the ways that they are named after."""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

from torch_mlc.runtime.stages.child import serve

FOLDER, STAGE = Path(sys.argv[1]), sys.argv[2]


def check(name):
    with (FOLDER / "calls").open("a") as calls:
        calls.write(f"{STAGE}: {name}\n")
    yield {"status": "ok", "figure": len(name), "strict": os.environ.get("MLC_STRICT", "")}
    if name == "rates" and (FOLDER / "crash").exists():
        ctypes.string_at(0)
    if name == "rates" and (FOLDER / "hang").exists():
        time.sleep(600)
    if name == "rates" and (FOLDER / "garbage").exists():
        os.write(json.loads(sys.argv[-1])["rows"], b"\xff\xfe no row\n")
        yield {"neither": "this"}
    if name == "rates" and (FOLDER / "raise").exists():
        raise ValueError("what it raises")
    if name == "rates" and (FOLDER / "wrong").exists():
        yield {"status": "wrong", "why": "a number"}
    if name == "rates" and (FOLDER / "wait").exists():
        (FOLDER / "waits").touch()
        time.sleep(600)


serve(sys.argv[-1], check)
