"""torch-mlc: a compiler backend for `torch.compile(model, backend="mlc")`.

The public names are loaded when they are first used, so that `import torch_mlc` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dynamo_backend.attribution.attribute import attribute
    from .dynamo_backend.attribution.attribution import Attribution
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
    from .dynamo_backend.quantize.errors import QuantizeError
    from .dynamo_backend.quantize.gguf import GgufFile, from_gguf_blocks, to_gguf_blocks
    from .dynamo_backend.quantize.model import quantize_
    from .dynamo_backend.quantize.modules import QuantizedEmbedding, QuantizedLinear, QuantizedWeight, pack_weight
    from .dynamo_backend.reports.page.compare import compare
    from .ir.expr.dots import register_dot
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
    "Attribution", "ExportError", "Formula", "Generator", "GgufFile", "IRModule", "MemoryStats", "NoConversion",
    "OptionError", "Options", "QuantizeError", "QuantizedEmbedding", "QuantizedLinear", "QuantizedWeight",
    "Registration", "RegistrationError", "Rule", "Schedule", "ScheduleError", "Trace", "__version__", "attribute",
    "compare", "compile", "empty_cache", "explain", "export", "from_fx", "from_gguf_blocks", "load",
    "load_cache_artifacts", "memory_stats", "pack_weight", "parse", "quantize_", "register_converter", "register_dot",
    "register_intrinsic", "register_pass", "register_pattern", "register_rule", "schedule", "show", "to_gguf_blocks",
]  # fmt: skip

_HOME = {
    "Attribution": "dynamo_backend.attribution.attribution",
    "ExportError": "dynamo_backend.export.errors",
    "Formula": "ir.expr.formula",
    "Generator": "dynamo_backend.generate.generator",
    "GgufFile": "dynamo_backend.quantize.gguf",
    "IRModule": "ir.graph.graph",
    "MemoryStats": "runtime.pool.pool",
    "NoConversion": "dynamo_backend.converters.registry",
    "OptionError": "runtime.settings.options",
    "Options": "runtime.settings.options",
    "QuantizeError": "dynamo_backend.quantize.errors",
    "QuantizedEmbedding": "dynamo_backend.quantize.modules",
    "QuantizedLinear": "dynamo_backend.quantize.modules",
    "QuantizedWeight": "dynamo_backend.quantize.modules",
    "Registration": "ir.registration",
    "RegistrationError": "ir.registration",
    "Rule": "scheduler.rules.registry",
    "Schedule": "scheduler.schedule.schedule",
    "ScheduleError": "scheduler.error",
    "Trace": "scheduler.schedule.trace",
    "attribute": "dynamo_backend.attribution.attribute",
    "compare": "dynamo_backend.reports.page.compare",
    "compile": "dynamo_backend.entry.modules",
    "empty_cache": "runtime.pool.pool",
    "explain": "dynamo_backend.explaining.explain",
    "export": "dynamo_backend.export.export",
    "from_fx": "dynamo_backend.entry.modules",
    "from_gguf_blocks": "dynamo_backend.quantize.gguf",
    "load": "dynamo_backend.export.load",
    "load_cache_artifacts": "runtime.compile.artifacts",
    "memory_stats": "runtime.pool.pool",
    "pack_weight": "dynamo_backend.quantize.modules",
    "parse": "ir.text.parser",
    "quantize_": "dynamo_backend.quantize.model",
    "register_converter": "dynamo_backend.converters.register",
    "register_dot": "ir.expr.dots",
    "register_intrinsic": "ir.expr.intrinsics",
    "register_pass": "dynamo_backend.compiling.register",
    "register_pattern": "dynamo_backend.patterns.register",
    "register_rule": "scheduler.rules.register",
    "schedule": "scheduler.schedule.overrides",
    "show": "ir.text.printer",
    "to_gguf_blocks": "dynamo_backend.quantize.gguf",
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
