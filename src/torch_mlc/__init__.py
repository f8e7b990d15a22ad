"""torch-mlc: a compiler backend for `torch.compile(model, backend="mlc")`.

The public names are loaded when they are first used, so that `import torch_mlc` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dynamo_backend.reports.explain import explain
    from .ir.printer import show
    from .runtime.artifacts import load_cache_artifacts
    from .runtime.nest_kernel import compile
    from .runtime.options import OptionError, Options
    from .scheduler.error import ScheduleError
    from .scheduler.overrides import schedule
    from .scheduler.schedule import Schedule
    from .scheduler.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "OptionError", "Options", "Schedule", "ScheduleError", "Trace", "__version__", "compile", "explain",
    "load_cache_artifacts", "schedule", "show",
]  # fmt: skip

_HOME = {
    "OptionError": "runtime.options",
    "Options": "runtime.options",
    "Schedule": "scheduler.schedule",
    "ScheduleError": "scheduler.error",
    "Trace": "scheduler.trace",
    "compile": "runtime.nest_kernel",
    "explain": "dynamo_backend.reports.explain",
    "load_cache_artifacts": "runtime.artifacts",
    "schedule": "scheduler.overrides",
    "show": "ir.printer",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}; its public names are {', '.join(__all__)}"
        )
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
