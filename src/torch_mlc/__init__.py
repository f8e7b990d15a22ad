"""torch-mlc: a compiler backend for `torch.compile(model, backend="mlc")`.

The public names are loaded when they are first used, so that `import torch_mlc` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dynamo_backend.explain import explain
    from .runtime.options import OptionError, Options

__version__ = "0.1.0"
__all__ = ["OptionError", "Options", "__version__", "explain"]

_HOME = {
    "OptionError": "runtime.options",
    "Options": "runtime.options",
    "explain": "dynamo_backend.explain",
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
