"""A process of checks, each of which goes wrong in a way of its own."""

import ctypes
import os
import subprocess
import sys
import time

from torch_mlc.runtime.stages.child import serve


def check(name):
    yield {"value": name}
    match name.partition(" ")[0]:
        case "crash":
            print("about to crash", flush=True)
            ctypes.string_at(0)
        case "hang":
            time.sleep(600)
        case "stuck":
            ctypes.pythonapi.usleep(600_000_000)  # with the interpreter's lock held
        case "leave":
            os._exit(7)
        case "raise":
            raise ValueError("not a number of mine")
        case "garbage":
            print("\0\xff" * 100, flush=True)
            os.write(int(os.environ["ROWS"]) if "ROWS" in os.environ else 1, b"{]\n")
            yield {"value": "after"}
        case "unread":
            import json

            fd = json.loads(sys.argv[-1])["rows"]
            os.write(fd, b"this is no row\n[1, 2]\n" + b"\xff\xfe\n")
            os._exit(0)
        case "child":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


if __name__ == "__main__":
    ill = sys.argv[1] == "ill"
    serve(sys.argv[-1], check, lambda: not ill)
