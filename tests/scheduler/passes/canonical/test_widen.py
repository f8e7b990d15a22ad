"""Which conversions to half types round, and which are made when stored: graphs before, and after for each numerics."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.graph.graph import Graph, IRModule, Library
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import VerifyError, verify
from torch_mlc.scheduler.context import PassContext
from torch_mlc.scheduler.passes import widen

# The type of each node, its value as it is imported, and what becomes of that with eager's numerics and with fast ones;
# None where it stays.
VALUES = {
    "in float32": (
        "bfloat16", "cast(add(cast(x[i0], float32), float32(1.0)), bfloat16)",
        None, "stored(add(cast(x[i0], float32), float32(1.0)), bfloat16)",
    ),
    "on the way": (
        "int64", "cast(cast(cast(exp(f[i0]), float16), float32), int64)",
        None, "cast(cast(stored(exp(f[i0]), float16), float32), int64)",
    ),
    "of a byte": (
        "float16", "cast(cast(b[i0], float32), float16)",
        "stored(cast(b[i0], float32), float16)", "stored(cast(b[i0], float32), float16)",
    ),
    "of four bits": (
        "bfloat16", "cast(bit_and(w[i0], int32(15)), bfloat16)",
        "stored(bit_and(w[i0], int32(15)), bfloat16)", "stored(bit_and(w[i0], int32(15)), bfloat16)",
    ),
    "of a word": ("bfloat16", "cast(cast(w[i0], float32), bfloat16)", None, None),
    "of float64": ("float16", "cast(cast(d[i0], float32), float16)", None, None),
    "to eight bits": ("float8_e5m2", "cast(f[i0], float8_e5m2)", None, None),
    "compared": (
        "bfloat16", "bitcast(cast(exp(f[i0]), bfloat16), dtype=bfloat16)",
        "cast(exp(f[i0]), bfloat16)", "cast(exp(f[i0]), bfloat16)",
    ),
    "compared choice": (
        "bfloat16", "bitcast(select(gt(f[i0], float32(0.0)), cast(f[i0], bfloat16), x[i0]), dtype=bfloat16)",
        "select(gt(f[i0], float32(0.0)), cast(f[i0], bfloat16), x[i0])",
        "select(gt(f[i0], float32(0.0)), cast(f[i0], bfloat16), x[i0])",
    ),
}  # fmt: skip


def graph_of(line: str) -> Graph:
    graph = parse(
        "@graph\ndef main(x: bfloat16[8], f: float32[8], b: int8[8], w: int32[8], d: float64[8]):\n"
        f"    {line}\n    return (y,)"
    )
    assert isinstance(graph, Graph)
    return graph


@pytest.mark.parametrize("numerics", ["eager", "fast"])
@pytest.mark.parametrize(("kind", "before", "eager", "fast"), VALUES.values(), ids=VALUES.keys())
def test_before_and_after(kind: str, before: str, eager: str | None, fast: str | None, numerics: str) -> None:
    after = (eager if numerics == "eager" else fast) or before
    for line in ("y = compute(KIND[8], lambda i0: VALUE)", "y, = scan(max, [KIND[8]], i0, lambda i0: (VALUE,))"):
        given, expected = (graph_of(line.replace("KIND", kind).replace("VALUE", v)) for v in (before, after))
        found = widen(given, PassContext(numerics))
        assert found == expected, show(found)
        assert (found is given) == (after == before)
        assert parse(show(found)) == found
        verify(IRModule({"main": found}))


@pytest.mark.parametrize("numerics", ["eager", "fast"])
def test_what_takes_the_place_of_a_call_rounds_as_that_did(numerics: str) -> None:
    """But where fast numerics let it go on in float32."""
    graph = graph_of("y, = library('aten::relu.default', [bfloat16[8]], (ref('x'),), 'torch')")
    (call,) = widen(graph, PassContext(numerics)).nodes
    assert isinstance(call, Library) and call.rounded == (numerics == "eager")


def test_eight_bits_are_rounded() -> None:
    with pytest.raises(VerifyError, match="no kernel keeps wider what is float8_e5m2"):
        verify(IRModule({"main": graph_of("y = compute(float8_e5m2[8], lambda i0: stored(f[i0], float8_e5m2))")}))


def test_a_kernel_rounds_or_does_not() -> None:
    function = parse(
        "@function\ndef f(in0: tensor(float32, [8], align=16), out0: output(tensor(bfloat16, [8], align=16))):\n"
        "    i0 = row(8)\n    t0 = compute(points, stored(in0[i0], bfloat16))\n    out0[i0] = t0"
    )
    assert isinstance(function, TensorFunction)
    with pytest.raises(VerifyError, match="a kernel rounds, or it does not"):
        verify(function)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sort(-1, descending=True)[0],
        lambda x: torch.zeros(7, dtype=x.dtype).index_put((torch.arange(5),), x.exp()),
        lambda x: (x * 0.1).scatter_add(0, torch.tensor([0, 3, 3, 1, 0]), x + 1),
    ],
    ids=["sort", "put", "add"],
)
def test_scatters_begin_with_numbers_that_wait_as_well(
    fn: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """What a scatter begins with is in a graph, too, and verified as such."""
    x = torch.randn(5).to(dtype)
    compiled = torch.compile(fn, backend="mlc", dynamic=False, options={"verify": 1, "cache": False})
    torch.testing.assert_close(compiled(x), fn(x))
