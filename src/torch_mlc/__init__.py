"""torch-mlc: a compiler backend for `torch.compile(model, backend="mlc")`.

The public names are loaded when they are first used, so that `import torch_mlc` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dynamo_backend.entry.modules import compile, from_fx
    from .dynamo_backend.explaining.explain import explain
    from .ir.graph.graph import IRModule
    from .ir.text.parser import parse
    from .ir.text.printer import show
    from .runtime.compile.artifacts import load_cache_artifacts
    from .runtime.settings.options import OptionError, Options
    from .scheduler.error import ScheduleError
    from .scheduler.schedule.overrides import schedule
    from .scheduler.schedule.schedule import Schedule
    from .scheduler.schedule.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "IRModule", "OptionError", "Options", "Schedule", "ScheduleError", "Trace", "__version__", "compile", "explain",
    "from_fx", "load_cache_artifacts", "parse", "schedule", "show",
]  # fmt: skip

_HOME = {
    "IRModule": "ir.graph.graph",
    "OptionError": "runtime.settings.options",
    "Options": "runtime.settings.options",
    "Schedule": "scheduler.schedule.schedule",
    "ScheduleError": "scheduler.error",
    "Trace": "scheduler.schedule.trace",
    "compile": "dynamo_backend.entry.modules",
    "explain": "dynamo_backend.explaining.explain",
    "from_fx": "dynamo_backend.entry.modules",
    "load_cache_artifacts": "runtime.compile.artifacts",
    "parse": "ir.text.parser",
    "schedule": "scheduler.schedule.overrides",
    "show": "ir.text.printer",
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
