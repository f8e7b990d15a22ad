"""Which element types eager's kernels for CPUs refuse: what ATen ops of the database's samples raise on others.

``python -m tests.opinfo.refused_types`` writes the table that the backend asks.
"""

from __future__ import annotations

import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import fx
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from torch_mlc.dynamo_backend.converters import CONVERTERS
from torch_mlc.dynamo_backend.importing.decompositions import decomposition_table

from ..workers import ROOT
from .cases import operators

MODULE = ROOT / "dynamo_backend" / "converters" / "refused_types.py"
# Types that kernels of ours compute with.
TYPES = (
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
)
# Types of samples: the first that an operator takes.
_BASES = (torch.float32, torch.int64, torch.bool)
_SAMPLES, _CALLS = 6, 8
_TRACED = 3
_NO_KERNEL = "not implemented for"
_BEGIN, _END = '_TABLE = """\n', '"""\n'


class Calls(TorchDispatchMode):
    """The calls of ATen ops that kernels of ours may stand for, with the type in whose place others are put.

    ``made`` are those of eager; of ``traced`` ones, that only graphs hold, eager makes others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[str, list[tuple[Any, Any, Any, torch.dtype]]] = defaultdict(list)
        self.traced: dict[str, list[tuple[Any, Any, Any, torch.dtype]]] = defaultdict(list)
        self.tracing = False
        self.known = CONVERTERS.keys() | {str(op) for op in decomposition_table() if not op._schema.is_mutable}
        self.base = torch.float32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = (self.traced if self.tracing else self.made)[str(func)] if str(func) in self.known else None
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if found is not None and len(found) < _CALLS and any(t.dtype is self.base for t in given):
            found.append((func, *tree_map_only(torch.Tensor, torch.clone, (args, kwargs or {})), self.base))
        return func(*args, **(kwargs or {}))

    def trace(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Record the calls of a function's graphs, and of their backward's."""

        def run_recorded(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(*values: Any) -> Any:
                self.tracing = True
                try:
                    with self:
                        return fx.Interpreter(graph).run(*values)
                finally:
                    self.tracing = False

            return make_boxed_func(run)

        flat, spec = tree_flatten((args, kwargs))
        places = [n for n, t in enumerate(flat) if isinstance(t, torch.Tensor)]

        def of_tensors(*tensors: torch.Tensor) -> list[torch.Tensor]:
            own, named = tree_unflatten(
                [tensors[places.index(n)] if n in places else v for n, v in enumerate(flat)], spec
            )
            return [t for t in tree_leaves(fn(*own, **named)) if isinstance(t, torch.Tensor)]

        results = aot_function(of_tensors, run_recorded)(*(flat[n] for n in places))
        if total := [t.sum() for t in results if t.requires_grad and t.is_floating_point()]:
            sum(total).backward()


def recorded(infos: Iterable[OpInfo]) -> Calls:
    """The calls that samples of operators make."""
    calls = Calls()
    for info in infos:
        base = next((b for b in _BASES if b in info.supported_dtypes("cpu")), None)
        if base is None or info.name.startswith("jiterator"):
            continue
        calls.base = base
        for s, _ in zip(info.sample_inputs("cpu", base), range(_SAMPLES)):
            with calls, torch.no_grad():
                info.op(s.input, *s.args, **s.kwargs)
        derives = info.supports_autograd and base.is_floating_point
        for s, _ in zip(info.sample_inputs("cpu", base, requires_grad=derives), range(_TRACED)):
            with suppress(Exception):  # what torch cannot trace has no graph
                calls.trace(info.op, (s.input, *s.args), s.kwargs)
    return calls


def refused(calls: Calls) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each op, and the types on which all its calls raise, or one for want of a kernel: others may have no elements.

    Of what only graphs hold, want of a kernel alone counts: its operands may be of several types.
    """
    for op in sorted(calls.made.keys() | calls.traced.keys()):
        made = calls.made.get(op, [])
        errors = {t: [_error(*call, getattr(torch, t)) for call in made or calls.traced[op]] for t in TYPES}
        types = tuple(t for t, found in errors.items() if (made and all(found)) or any(_NO_KERNEL in e for e in found))
        if types:
            yield op.removeprefix("aten."), types


def _error(func: Any, args: Any, kwargs: Any, base: torch.dtype, dtype: torch.dtype) -> str:
    """What a call on another type raises, "" for nothing."""

    def converted(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if t.dtype is base else t.clone()

    try:
        with torch.no_grad():
            func(*tree_map_only(torch.Tensor, converted, args), **tree_map_only(torch.Tensor, converted, kwargs))
    except Exception as error:  # whatever it is, the library's call raises it
        return str(error) or type(error).__name__
    return ""


def write(path: Path = MODULE) -> None:
    """Write the table into its module: ops with the same types together."""
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for op, types in refused(recorded(operators().values())):
        alike[types].append(op)
    rows = [
        f"{' '.join(types)}:\n{textwrap.fill(' '.join(ops), 120, initial_indent='    ', subsequent_indent='    ')}\n"
        for types, ops in sorted(alike.items())
    ]
    head, _, rest = path.read_text().partition(_BEGIN)
    path.write_text(head + _BEGIN + "".join(rows) + _END + rest.partition(_END)[2])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    write()
