"""The backward of attention as tensor functions: what graphs of gradients become before any loop is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy
import torch
from torch import Tensor

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.expr.monoid import SUM
from torch_mlc.ir.expr.role import Role
from torch_mlc.ir.expr.symbols import Size, SymbolTable
from torch_mlc.ir.expr.value import Expr, IndexValue, Load, Select, call, cast, const, symbol
from torch_mlc.ir.function.function import Dim, Output, Stage, TensorFunction
from torch_mlc.ir.nest.loops import Buffer, contiguous_strides
from torch_mlc.runtime.compile.fallback import random_words

F32, I64 = DType.FLOAT32, DType.INT64
CAP, SCALE = 5.0, 0.3


@dataclass(frozen=True)
class Sizes:
    """Batch, rows, columns, width of scores and of values; ``dropout`` of a quarter of the probabilities."""

    b: int = 2
    m: int | sympy.Symbol = 5
    n: int | sympy.Symbol = 7
    e: int = 4
    d: int = 3
    dtype: DType = F32
    dropout: bool = False
    # Whether what is added to capped scores, the same for the batch, has a gradient too: that of keys gives it.
    bias: bool = False
    # Whether the gradient of queries makes what rows are told itself, of gradient and output, and gives it to others.
    told: bool = False
    # Inputs that are of bfloat16 whatever the others are.
    narrow: tuple[str, ...] = ()
    # How many times the width the rows in memory have, of which these inputs are the first part.
    packed: int = 1
    # Rows see keys up to this many behind their own place (a negative number: only before it), and at most so many.
    ahead: int = 0
    window: int | None = None
    # Whether a row's largest score and the logarithm of its sum are two numbers, and not their sum.
    apart: bool = False


SEED, KEPT = 5, 0.75
PACKED = ("q", "k", "v")


def _buffers(z: Sizes) -> dict[str, Buffer]:
    shapes = {"q": (z.b, z.m, z.e), "k": (z.b, z.n, z.e), "v": (z.b, z.n, z.d), "g": (z.b, z.m, z.d),
              **dict.fromkeys(("top", "log_total") if z.apart else ("lse",), (z.b, z.m)),
              **({"o": (z.b, z.m, z.d)} if z.told else {"delta": (z.b, z.m)})}  # fmt: skip
    shapes |= {name: (*shape[:2], shape[2] * z.packed) for name, shape in shapes.items() if name in PACKED}
    exact = {name: tuple(map(sympy.sympify, shape)) for name, shape in shapes.items()}
    return {
        name: Buffer(name, shape, contiguous_strides(shape), _kind(z, name, len(shape)))
        for name, shape in exact.items()
    }


def _kind(z: Sizes, name: str, rank: int) -> DType:
    return DType.BFLOAT16 if name in z.narrow else z.dtype if rank == 3 else F32


def gradients(z: Sizes, of_keys: bool) -> TensorFunction:
    """Of ``softmax(cap(q @ k^T)) @ v`` with a causal mask: the gradient of queries, or those of values and keys."""
    b, tiled, streamed, x0, x1, x2, x3, x4 = map(symbol, ("i0", "i1", "r0", "x0", "x1", "x2", "x3", "x4"))
    m, n = (streamed, tiled) if of_keys else (tiled, streamed)
    buffers = _buffers(z)
    grid = (b, tiled, streamed)

    def load(name: str, *indices: sympy.Expr) -> Expr:
        return cast(Load(name, indices, buffers[name].dtype), F32)

    def local(name: str, *indices: sympy.Expr) -> Expr:
        return Load(name, indices, F32)

    def product(name: str, left: Expr, right: Expr, over: sympy.Symbol, axes: tuple[sympy.Symbol, ...]) -> Stage:
        role = Role.SCORE if axes == grid else Role.WEIGHTED_SUM if over == streamed else Role.ROW_TOTAL
        return Stage((name,), (call("mul", left, right),), True, SUM, axes=axes, over=(over,), role=role)

    def weight(name: str, value: Expr) -> Stage:
        return Stage((name,), (value,), True, axes=grid, role=Role.WEIGHT)

    def result(name: str, source: str, x: sympy.Symbol) -> Stage:
        return Stage((name,), (local(source, b, tiled, x),), True, axes=(b, tiled, x), role=Role.RESULT)

    tanh = call("tanh", call("mul", local("t0", *grid), const(SCALE / CAP, F32)))
    score = call("mul", tanh, const(CAP, F32))
    sees = call("le", IndexValue(n, I64), IndexValue(m + z.ahead, I64))
    if z.window is not None:
        sees = call("logical_and", sees, call("gt", IndexValue(n, I64), IndexValue(m + z.ahead - z.window, I64)))
    shown = Select(sees, score, const(float("-inf"), F32))
    for name in ("top", "log_total") if z.apart else ("lse",):
        shown = call("sub", shown, load(name, b, m))
    probability = call("exp", shown)
    given = local("t1", *grid)
    if z.dropout:
        place = IndexValue((b * sympy.sympify(z.m) + m) * sympy.sympify(z.n) + n, I64)
        number = call("rand", const(SEED, I64), place, dtype=F32)
        factor = Select(call("lt", number, const(KEPT, F32)), const(1 / KEPT, F32), const(0.0, F32))
        given = call("mul", given, local("t8", *grid))
    told = local("t11", b, m) if z.told else load("delta", b, m)
    flow = call("mul", local("t2", *grid), call("sub", given, told))
    slope = call("mul", call("sub", const(1.0, F32), call("mul", tanh, tanh)), const(SCALE, F32))
    masked = Select(sees, flow, const(0.0, F32))
    own = [product("t11", load("g", b, m, x4), load("o", b, m, x4), x4, (b, m))] if z.told else []
    stages = [
        *own,
        product("t0", load("q", b, m, x0), load("k", b, n, x0), x0, grid),
        product("t1", load("g", b, m, x1), load("v", b, n, x1), x1, grid),
        *([weight("t8", factor)] if z.dropout else []),
        weight("t2", probability),
        weight("t3", call("mul", masked, slope)),
    ]
    weighs = "t2"
    if of_keys and z.dropout:
        weighs = "t9"
        stages.append(weight("t9", call("mul", local("t2", *grid), local("t8", *grid))))
    if of_keys:
        stages += [
            product("t4", local(weighs, *grid), load("g", b, m, x2), streamed, (b, tiled, x2)),
            product("t5", local("t3", *grid), load("q", b, m, x3), streamed, (b, tiled, x3)),
            result("t6", "t4", x2),
            result("t7", "t5", x3),
        ]
        results = (("t6", x2, z.d), ("t7", x3, z.e))
        if z.bias:
            total = Stage(("t10",), (masked,), True, SUM, axes=(tiled, streamed), over=(b,), role=Role.WEIGHT_TOTAL)
            stages.insert(-2, total)
    else:
        stages += [
            product("t4", local("t3", *grid), load("k", b, n, x2), streamed, (b, tiled, x2)),
            result("t5", "t4", x2),
        ]
        results = (("t5", x2, z.e),)
    long, short = (z.n, z.m) if of_keys else (z.m, z.n)
    outputs = []
    for k, (name, axis, width) in enumerate(results):
        shape = (sympy.Integer(z.b), sympy.sympify(long), sympy.Integer(width))
        outputs.append(Output(Buffer(f"out{k}", shape, contiguous_strides(shape), z.dtype), name, (b, tiled, axis)))
    if z.told:
        shape = (sympy.Integer(z.b), sympy.sympify(z.m))
        outputs.append(Output(Buffer("out1", shape, contiguous_strides(shape), F32), "t11", (b, m)))
    if of_keys and z.bias:
        shape = (sympy.sympify(z.m), sympy.sympify(z.n))
        outputs.append(Output(Buffer("out2", shape, contiguous_strides(shape), F32), "t10", (streamed, tiled)))
    symbols = sorted({s for x in (z.m, z.n) for s in sympy.sympify(x).free_symbols}, key=str)
    extra = [(x0, z.e), (x1, z.d), *([(x4, z.d)] if z.told else []), *((axis, width) for _, axis, width in results)]
    return TensorFunction(
        "gradients", (Dim(b, sympy.Integer(z.b)), Dim(tiled, sympy.sympify(long))),
        (Dim(streamed, sympy.sympify(short)),), tuple(buffers.values()), tuple(outputs), tuple(stages),
        SymbolTable(tuple(Size(s, 1) for s in symbols)), tuple(Dim(x, sympy.Integer(w)) for x, w in extra),
    )  # fmt: skip


def bias_gradient(z: Sizes) -> TensorFunction:
    """Of what is added to the scores of ``gradients``, the same for the whole batch: a function of its own."""
    function = gradients(replace(z, bias=True), True)
    b, keys, rows = symbol("i0"), symbol("i1"), symbol("r0")
    stages = [s for s in function.stages if s.results[0] in ("t0", "t1", "t2", "t10")]
    dims = {d.var: d for d in function.dims}
    return replace(
        function, name="bias_gradient", rows=(dims[rows], dims[keys]), inner=(dims[b],), stages=tuple(stages),
        outputs=tuple(replace(o, buffer=replace(o.buffer, name="out0")) for o in function.outputs if o.result == "t10"),
        extra=tuple(d for d in function.extra if d.var in (symbol("x0"), symbol("x1"))),
    )  # fmt: skip


def tensors(z: Sizes, m: int, n: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs by name, and the gradients of q, k, v and bias in float64."""
    kind = z.dtype.torch
    q, k, v, g = (torch.randn(z.b, x, w).to(kind) for x, w in ((m, z.e), (n, z.e), (n, z.d), (m, z.d)))
    exact = [t.double().requires_grad_() for t in (q, k, v, torch.zeros(m, n))]
    capped = CAP * torch.tanh(exact[0] @ exact[1].mT * (SCALE / CAP)) + exact[3]
    behind = torch.arange(n) - torch.arange(m)[:, None] - z.ahead
    unseen = (behind > 0) if z.window is None else (behind > 0) | (behind <= -z.window)
    scores = capped.masked_fill(unseen, float("-inf"))
    probabilities = torch.softmax(scores, -1)
    if z.dropout:
        numbers = random_words(torch.tensor(SEED), torch.arange(z.b * m * n)).view(z.b, m, n) >> 8
        probabilities = torch.where(numbers * 2.0**-24 < KEPT, probabilities / KEPT, 0.0)
    out = probabilities @ exact[2]
    out.backward(g.double())
    lse = torch.logsumexp(scores, -1).detach().float()
    delta = (out.detach() * g.double()).sum(-1).float()
    top = scores.detach().amax(-1).float()
    log_total = torch.where(top.isinf(), torch.nan, lse - top)
    given = {"q": q, "k": k, "v": v, "g": g, "lse": lse, "delta": delta, "top": top, "log_total": log_total}
    return given, {name: t.grad for name, t in zip(("q", "k", "v", "bias"), exact, strict=True) if t.grad is not None}
