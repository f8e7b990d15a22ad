"""The process of one stage of `torch-mlc doctor`: its arguments are the stage, a target, and a request
(``runtime/stages``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module

from ...runtime.stages.child import serve
from .finding import Row

_ROOM = __package__


def main(stage: str, target: str, request: str) -> None:
    """Run the checks of a request, of a stage by name. Modules are loaded here alone: one that cannot be is told."""
    checks: Mapping[str, Callable[[], Iterator[Row]]]
    well: Callable[[], bool] = lambda: True  # noqa: E731  # the stage of GPUs has its own
    match stage:
        case "installation":
            checks = import_module(f"{_ROOM}.installation").CHECKS
        case "CPU":
            checks = import_module(f"{_ROOM}.on_cpu").CHECKS
        case "driver":
            checks = import_module(f"{_ROOM}.on_gpu").DRIVER
        case "GPU":
            on_gpu = import_module(f"{_ROOM}.on_gpu")
            checks, well = on_gpu.CHECKS, on_gpu.gpu_is_well
        case _:
            checks = import_module(f"{_ROOM}.absent").checks_for(target)
    serve(request, lambda name: checks[name](), well)


if __name__ == "__main__":
    main(*sys.argv[1:4])
