"""A process in place of the doctor's, in which the stage of the CPU goes wrong."""

import os
import sys
import time

from torch_mlc.dynamo_backend.doctor.finding import row
from torch_mlc.runtime.stages.child import serve

HOW, STAGE = sys.argv[1], sys.argv[2]


def check(name):
    if STAGE == "CPU" and name == "softmax":
        if HOW == "crash":
            os.abort()
        if HOW == "hang":
            time.sleep(600)
        if HOW == "raise":
            raise RuntimeError("what a kernel raises")
        if HOW == "garbage":
            print("\0garbage" * 10000)
            yield {"mark": "splendid"}
            return
    mark = "warning" if HOW == "warning" else "ok"
    yield row("not done" if STAGE == "driver" else mark, f"{name} of {STAGE}", gpu=HOW == "gpu")


if HOW == "broken":
    raise ImportError("libtorch.so: no such file")
serve(sys.argv[-1], check)
