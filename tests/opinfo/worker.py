"""A process that checks samples.

``{"start": n}`` goes out before what begins with sample n is run, so that whoever reads knows whom a crash or a hang
belongs to; of several together (``at_once``), it is not known which one.
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
            found = cases.telling(job) if request["telling"] else cases.samples(job, most)
        except Exception as error:
            say(job_done=True, error=f"{type(error).__name__}: {error}"[:300])
            return
        say(samples=len(found))
        for n in range(first, len(found), request["at_once"]):
            say(start=n)
            for k, outcome in enumerate(check.check_all(job, found[n : n + request["at_once"]])):
                say(done=n + k, outcome=outcome.record())
        say(job_done=True)

    return handle


if __name__ == "__main__":
    serve(load)
