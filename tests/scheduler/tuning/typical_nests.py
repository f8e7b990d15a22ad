"""Nests of the kinds that models are made of, in small and odd sizes, and what they compute of random arguments."""

from __future__ import annotations

from functools import cache

import torch

import torch_mlc
from torch_mlc.ir.function.function import TensorFunction
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.tuning.measure import make_arguments
from torch_mlc.scheduler.functions.lower import lower_to_loops
from torch_mlc.scheduler.schedule.schedule import Schedule

Tensor = torch.Tensor
F = "tensor(float32, {}, align=16)"


def _text(params: str, dims: str, body: str, sizes: str = "") -> str:
    """A function; a parameter is written "name[shape]", an output "name>[shape]"."""
    given = []
    for p in params.split():
        name, shape = p.split("[")
        dtype = "bfloat16" if name.endswith("!") else "float32"
        of = f"tensor({dtype}, [{shape.replace(',', ', ')}, align=16)"
        given.append(f"{name[:-1]}: output({of})" if name.endswith(">") else f"{name.rstrip('!')}: {of}")
    lines = [*filter(None, sizes.split(";")), *dims.split(";"), *body.split(";")]
    return f"@function\ndef f({', '.join(given)}):\n" + "".join(f"    {line.strip()}\n" for line in lines)


_WINDOW = "in0[i0, i1 + r0, i2 + r1]"
TEXTS = {
    "gelu": _text("x[7,301] y[7,301] o>[7,301]", "i0 = row(7); i1 = row(301)",
                  "t = compute(points, mul(mul(x[i0, i1], erf(x[i0, i1])), y[i0, i1])); o[i0, i1] = t"),
    "broadcast": _text("x[9,70] w[70] b[70] o>[9,70]", "i0 = row(9); i1 = row(70)",
                       "t = compute(points, add(mul(x[i0, i1], w[i1]), b[i1])); o[i0, i1] = t"),
    "transpose": _text("x[60,53] o>[53,60]", "i0 = row(53); i1 = row(60)",
                       "t = compute(points, add(x[i1, i0], float32(1.0))); o[i0, i1] = t"),
    "row sum": _text("x[13,530] o>[13]", "i0 = row(13); r0 = inner(530)",
                     "t, = reduce(sum, rows, inner, (x[i0, r0],)); o[i0] = t"),
    "softmax": _text("x[11,150] o>[11,150]", "i0 = row(11); r0 = inner(150)",
                     "m, = reduce(max, rows, inner, (x[i0, r0],)); e = compute(points, exp(sub(x[i0, r0], m[i0])));"
                     "s, = reduce(sum, rows, inner, (e[i0, r0],)); t = compute(points, div(e[i0, r0], s[i0]));"
                     "o[i0, r0] = t"),
    "layer norm": _text("x[10,200] w[200] o>[10,200]", "i0 = row(10); r0 = inner(200)",
                        "a, = reduce(sum, rows, inner, (x[i0, r0],));"
                        "m = compute(rows, mul(a[i0], float32(0.005)));"
                        "d = compute(points, sub(x[i0, r0], m[i0]));"
                        "v, = reduce(sum, rows, inner, (mul(d[i0, r0], d[i0, r0]),));"
                        "t = compute(points, mul(mul(d[i0, r0], rsqrt(add(v[i0], float32(1.0)))), w[r0]));"
                        "o[i0, r0] = t"),
    "column sum": _text("x[600,70] o>[70]", "i0 = row(70); r0 = inner(600)",
                        "t, = reduce(sum, rows, inner, (x[r0, i0],)); o[i0] = t"),
    "column moments": _text("x[300,40] o>[40] p>[40]", "i0 = row(40); r0 = inner(300)",
                            "a, b = reduce(moments, rows, inner, (x[r0, i0], mul(x[r0, i0], x[r0, i0])));"
                            "o[i0] = a; p[i0] = b"),
    "pooling": _text("in0[5,30,41] o>[5,28,39]", "i0 = row(5); i1 = row(28); i2 = row(39);"
                     "r0 = inner(3); r1 = inner(3)", f"t, = reduce(sum, rows, inner, ({_WINDOW},)); o[i0, i1, i2] = t"),
    "product": _text("x[3,96] w![50,96] o>[3,50]", "i0 = row(3); i1 = row(50); r0 = inner(96)",
                     "t, = reduce(sum, rows, inner, (mul(x[i0, r0], cast(w[i1, r0], float32)),)); o[i0, i1] = t"),
    "scan": _text("x[6,90] o>[6,90]", "i0 = row(6); r0 = inner(90)",
                  "t, = scan(sum, points, (x[i0, r0],)); o[i0, r0] = t"),
    "maximum": _text("x[12,333] o>[12]", "i0 = row(12); r0 = inner(333)",
                     "t, = reduce(max, rows, inner, (x[i0, r0],)); o[i0] = t"),
    "symbolic softmax": _text("x[s0,s1] o>[s0,s1]", "i0 = row(s0); r0 = inner(s1)",
                              "m, = reduce(max, rows, inner, (x[i0, r0],));"
                              "e = compute(points, exp(sub(x[i0, r0], m[i0])));"
                              "s, = reduce(sum, rows, inner, (e[i0, r0],));"
                              "t = compute(points, div(e[i0, r0], s[i0])); o[i0, r0] = t",
                              "s0 = size(lower=2, hint=11); s1 = size(lower=2, upper=400, hint=150)"),
}  # fmt: skip
NAMES = tuple(TEXTS)


@cache
def nest(name: str) -> LoopNest:
    """The nest of that name, as lowered."""
    return lower(TEXTS[name])


def lower(text: str) -> LoopNest:
    function = parse(text)
    assert isinstance(function, TensorFunction)
    return lower_to_loops(function)


@cache
def inputs(name: str) -> tuple[Tensor, ...]:
    """Random arguments, some of them large and small, with an infinity where no row would be NaN alone."""
    given = make_arguments(nest(name), "cpu", seed=3)
    outputs = nest(name).outputs
    tensors = [t for t, b in zip(given.tensors, nest(name).params, strict=True) if b.name not in outputs]
    generator = torch.Generator().manual_seed(5)
    for t in tensors:
        t.mul_((torch.rand(t.shape, generator=generator) * 8).to(t.dtype))
    return tuple(tensors)


def results(name: str, schedule: Schedule) -> tuple[Tensor, ...]:
    """What the compiled schedule computes of ``inputs``. Raises EmitError where it has no code."""
    found = torch_mlc.compile(schedule)(*inputs(name))
    return found if isinstance(found, tuple) else (found,)


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(
        torch.equal(x.reshape(-1).view(torch.int32), y.reshape(-1).view(torch.int32)) for x, y in zip(a, b, strict=True)
    )
