"""A process that makes and checks programs. ``{"program": …}`` goes out before the check, so that whoever reads knows
what a crash or a hang belongs to. With a ``target``, what is made of a seed is compiled for a GPU that is not here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..workers import Handler, leave_guards_untimed, serve


def load() -> Handler:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once
    import torch
    from torch._dynamo import config

    from . import check, generate, program

    torch.set_num_threads(1)
    # What torch remembers of its ops' shapes costs more than it spares where every program is another one.
    config.fake_tensor_cache_enabled = False
    leave_guards_untimed()

    def handle(request: dict[str, Any], say: Callable[..., None]) -> None:
        if "seed" in request:
            made = generate.make_program(request["seed"])
            if request.get("target"):
                made = program.on_target(made, request["target"])
            say(program=made.record())
        else:
            made = program.Program.of(request["program"])
        say(outcome=check.check(made).record())

    return handle


if __name__ == "__main__":
    serve(load)
