"""The time of a library's call on a GPU that need not be here, by the machine's sheet: nobody sees a library's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from ...ir.expr.dtypes import DType
from ...ir.graph.begun import TO_COPY, device_copies, is_begun_copy, is_wait
from ...ir.graph.by_size import call_at
from ...ir.graph.graph import Graph, Library, Ref, TensorType
from ...ir.machine import Machine
from ...ir.target import Target
from ...runtime.model.predict import EFFICIENCY
from ...scheduler.cost.alignment import rates_left, wants_aligned
from ...scheduler.cost.begun import copy_time
from ...scheduler.cost.products.gpu_tiles import LEAST
from ...scheduler.facts.contraction import factors_of, is_aligned

# What libraries' products reach of ``Machine.matmul``: cuBLAS takes 189 us for 4096 x 4096 x 4096 halves on an H200.
_PRODUCTS = 0.9


def library_seconds(node: Library, graph: Graph, moved: int, target: Target) -> float:
    """Seconds of a call of a library that moves so many bytes, with the launch: its operations, as far as torch counts
    those of that op, at the rate of the type, or its bytes at memory's, whichever takes longer.

    A copy between devices takes its bytes at the rate of the link. One that is begun beside other calls, and a wait,
    count nothing: how much of it those hide is not predicted.
    """
    node = call_at(node, graph.symbols.hint)
    if is_begun_copy(node) or is_wait(node):
        return 0.0
    copy = next((c for c in device_copies(graph).values() if c.call is node), None) if node.target == TO_COPY else None
    if copy is not None:
        sides = 1 if copy.to_host or copy.from_host else 2
        return copy_time(graph.symbols.hint(copy.type.nbytes), *(target.machine,) * sides) * 1e-9
    dtype, types = _multiplied(node, graph), graph.types()
    narrow = has_narrow_groups(node.target, tuple(_given(a, types, graph.symbols.hint) for a in node.args))
    left = _rates_left(node, graph, dtype, target)
    return call_seconds(operations_of(node, graph), dtype, moved, target, left, narrow)


def call_seconds(
    operations: int,
    dtype: DType,
    moved: int,
    target: Target,
    left: tuple[float, float] = (1.0, 1.0),
    narrow: bool = False,
) -> float:
    """The same of a call by its figures; ``dtype`` is what it multiplies, ``left`` what is left of the rates of
    reading and of multiplying, and ``narrow`` whether it is a convolution that has no tiles for tensor cores."""
    machine, (reading, multiplying) = target.machine, left
    rate = min(product_rate(dtype, target), machine.float32) if narrow else product_rate(dtype, target)
    compute = operations / (_PRODUCTS * rate * multiplying)
    return (max(compute, moved / (EFFICIENCY * machine.bandwidth * reading)) + machine.launch) * 1e-9


def _rates_left(node: Library, graph: Graph, dtype: DType, target: Target) -> tuple[float, float]:
    """What a product of half types reaches of the rates where rows of its matrices begin anywhere."""
    names, types = factors_of(node), graph.types()
    if not names or not wants_aligned(target, dtype) or dtype not in target.machine.multiplied:
        return 1.0, 1.0
    operands, results = (
        (is_aligned(types[n], graph.symbols, typically=True) for n in ns) for ns in (names, node.names)
    )
    return rates_left(all(operands), all(results))


def has_narrow_groups(op: str, args: Sequence[Any]) -> bool:
    """Whether a call is a convolution whose groups have fewer results at a place than a tile of tensor cores has
    columns (depthwise ones have one): lanes multiply those. ``args`` hold tensors."""
    if op.partition("::")[2].partition(".")[0] != "convolution":
        return False
    weight, transposed, groups = args[1], bool(args[6]), int(args[8])
    return groups > 1 and (weight.shape[1] if transposed else weight.shape[0] // groups) < LEAST


def operations_of(node: Library, graph: Graph) -> int:
    """Multiplications and additions of a call at typical sizes, as ``torch.utils.flop_counter`` counts them; zero for
    ops that it does not know."""
    namespace, _, name = node.target.partition("::")
    packet = getattr(torch.ops.aten, name.partition(".")[0], None) if namespace == "aten" else None
    count = flop_registry.get(packet)
    if count is None:
        return 0
    types, hint = graph.types(), graph.symbols.hint
    made = [None if t is None else _meta(t, hint) for t in node.types]
    args = tuple(_given(a, types, hint) for a in node.args)
    kwargs = {k: _given(v, types, hint) for k, v in node.kwargs}
    return int(count(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))


def product_rate(dtype: DType, target: Target) -> float:
    """Operations a nanosecond of a library's products of a type."""
    machine: Machine = target.machine
    if dtype is DType.FLOAT32:
        return machine.matmul / 2 if "+tf32" in target.features else machine.float32
    if dtype is DType.FLOAT64 and machine.pipes is not None:
        return machine.float32 * machine.pipes.double / machine.pipes.fma
    return machine.matmul * 2 / dtype.itemsize if dtype in machine.multiplied else machine.float32


def _multiplied(node: Library, graph: Graph) -> DType:
    """The type of the tensors that a call multiplies: that of its first argument."""
    types = graph.types()
    first = next((types[a.name].dtype for a in node.args if isinstance(a, Ref) and a.name in types), None)
    return first or next((t.dtype for t in node.types if t is not None), DType.FLOAT32)


def _meta(kind: TensorType, hint: Callable[[sympy.Expr], int]) -> torch.Tensor:
    return torch.empty([hint(n) for n in kind.shape], dtype=kind.dtype.torch, device="meta")


def _given(value: Any, types: Mapping[str, TensorType], hint: Callable[[sympy.Expr], int]) -> Any:
    match value:
        case Ref(name=name) if name in types:
            return _meta(types[name], hint)
        case sympy.Expr():
            return hint(value)
        case list() | tuple():
            return [_given(v, types, hint) for v in value]
    return value
