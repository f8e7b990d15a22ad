"""A process that checks samples.

``{"start": n}`` goes out before sample n is run, so that whoever reads knows which one a crash or a hang belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..workers import Handler, leave_guards_untimed, serve


def load() -> Handler:
    import torch

    from . import cases, check

    torch.set_num_threads(1)
    leave_guards_untimed()

    def handle(request: dict[str, Any], say: Callable[..., None]) -> None:
        job, first, most = cases.Job(*request["job"]), request["first"], request["most"]
        try:
            found = cases.samples(job, most)
        except Exception as error:
            say(job_done=True, error=f"{type(error).__name__}: {error}"[:300])
            return
        say(samples=len(found))
        for n, sample in enumerate(found):
            if n < first:
                continue
            say(start=n)
            say(done=n, outcome=check.check(job, sample).record())
        say(job_done=True)

    return handle


if __name__ == "__main__":
    serve(load)
