"""torch-mlc: a compiler backend for `torch.compile(model, backend="mlc")`.

The public names are loaded when they are first used, so that `import torch_mlc` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dynamo_backend.compiling.register import register_pass
    from .dynamo_backend.converters.register import register_converter
    from .dynamo_backend.converters.registry import NoConversion
    from .dynamo_backend.entry.modules import compile, from_fx
    from .dynamo_backend.explaining.explain import explain
    from .dynamo_backend.export.errors import ExportError
    from .dynamo_backend.export.export import export
    from .dynamo_backend.export.load import load
    from .dynamo_backend.generate.generator import Generator
    from .dynamo_backend.patterns.register import register_pattern
    from .dynamo_backend.reports.page.compare import compare
    from .ir.expr.formula import Formula
    from .ir.expr.intrinsics import register_intrinsic
    from .ir.graph.graph import IRModule
    from .ir.registration import Registration, RegistrationError
    from .ir.text.parser import parse
    from .ir.text.printer import show
    from .runtime.compile.artifacts import load_cache_artifacts
    from .runtime.pool.pool import MemoryStats, empty_cache, memory_stats
    from .runtime.settings.options import OptionError, Options
    from .scheduler.error import ScheduleError
    from .scheduler.rules.register import register_rule
    from .scheduler.rules.registry import Rule
    from .scheduler.schedule.overrides import schedule
    from .scheduler.schedule.schedule import Schedule
    from .scheduler.schedule.trace import Trace

__version__ = "0.1.0"
__all__ = [
    "ExportError", "Formula", "Generator", "IRModule", "MemoryStats", "NoConversion", "OptionError", "Options",
    "Registration", "RegistrationError", "Rule", "Schedule", "ScheduleError", "Trace", "__version__", "compare",
    "compile", "empty_cache", "explain", "export", "from_fx", "load", "load_cache_artifacts", "memory_stats", "parse",
    "register_converter", "register_intrinsic", "register_pass", "register_pattern", "register_rule", "schedule",
    "show",
]  # fmt: skip

_HOME = {
    "ExportError": "dynamo_backend.export.errors",
    "Formula": "ir.expr.formula",
    "Generator": "dynamo_backend.generate.generator",
    "IRModule": "ir.graph.graph",
    "MemoryStats": "runtime.pool.pool",
    "NoConversion": "dynamo_backend.converters.registry",
    "OptionError": "runtime.settings.options",
    "Options": "runtime.settings.options",
    "Registration": "ir.registration",
    "RegistrationError": "ir.registration",
    "Rule": "scheduler.rules.registry",
    "Schedule": "scheduler.schedule.schedule",
    "ScheduleError": "scheduler.error",
    "Trace": "scheduler.schedule.trace",
    "compare": "dynamo_backend.reports.page.compare",
    "compile": "dynamo_backend.entry.modules",
    "empty_cache": "runtime.pool.pool",
    "explain": "dynamo_backend.explaining.explain",
    "export": "dynamo_backend.export.export",
    "from_fx": "dynamo_backend.entry.modules",
    "load": "dynamo_backend.export.load",
    "load_cache_artifacts": "runtime.compile.artifacts",
    "memory_stats": "runtime.pool.pool",
    "parse": "ir.text.parser",
    "register_converter": "dynamo_backend.converters.register",
    "register_intrinsic": "ir.expr.intrinsics",
    "register_pass": "dynamo_backend.compiling.register",
    "register_pattern": "dynamo_backend.patterns.register",
    "register_rule": "scheduler.rules.register",
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
