"""A process that checks samples: jobs come as lines of JSON on its input, what it found goes out the same way.

``{"start": n}`` goes out before sample n is run, so that whoever reads knows which one a crash or a hang belongs to.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any


def main() -> None:
    """Serve until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    import torch

    from . import cases, check

    torch.set_num_threads(1)
    say(ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        job, first, most = cases.Job(*request["job"]), request["first"], request["most"]
        try:
            found = cases.samples(job)
        except Exception as error:
            say(job_done=True, error=f"{type(error).__name__}: {error}"[:300])
            continue
        say(samples=len(found))
        for n, sample in enumerate(found[:most] if most else found):
            if n < first:
                continue
            say(start=n)
            with contextlib.redirect_stdout(sys.stderr):
                outcome = check.check(job, sample)
            say(done=n, outcome=outcome.record())
        say(job_done=True)


if __name__ == "__main__":
    main()
