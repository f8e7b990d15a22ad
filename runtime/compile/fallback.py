"""A tensor function by ATen ops: what runs where a kernel could not be compiled, on any device torch has.

Every value is a whole tensor over the function's dimensions, with extent one along those it does not depend on. Slow,
general, and with the meaning of the IR: a ``Select`` computes both branches, so loads that its condition guards are
clamped into range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch

from ...ir.errors import DivisionByZeroError, MlcError, OutOfRangeError
from ...ir.expr.dtypes import DType
from ...ir.expr.intrinsics import INTRINSICS, definition
from ...ir.expr.iterations import ITERATIONS, iteration
from ...ir.expr.monoid import Monoid
from ...ir.expr.ops import APPROXIMATIONS
from ...ir.expr.value import Call, Cast, Const, Expr, Index, IndexValue, Load, Select, Var, is_value
from ...ir.function.function import Dim, Output, Stage, TensorFunction
from ...ir.nest.loops import Buffer
from ...ir.oracle.text import index_text

Tensor: TypeAlias = torch.Tensor
Env = Mapping[str, Tensor]


class FallbackError(MlcError):
    """A function holds what no ATen op computes."""


@dataclass(frozen=True, slots=True)
class AtenKernel:
    """A function as a callable of tensors (inputs, then outputs to fill) and of the sizes of its symbols."""

    function: TensorFunction

    def __call__(self, *arguments: Any) -> None:
        """``kernel(tensors, sizes)``, or ``kernel(rows, tensors, sizes)`` of a function over a table."""
        if not self.function.table:
            self.run(*arguments)
            return
        rows, tensors, sizes = arguments
        width, count = len(tensors) // rows, len(sizes) // rows
        for k in range(rows):
            self.run(tensors[k * width : (k + 1) * width], sizes[k * count : (k + 1) * count])

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[int] = ()) -> None:
        """The work of one call."""
        f = self.function
        buffers = f.params
        numbers = {s.name: int(n) for s, n in zip(f.symbols.symbols, sizes, strict=True)}
        device = tensors[0].device
        run = _Run(f, dict(zip((b.name for b in buffers), tensors, strict=True)), numbers, device)
        with torch.no_grad():
            run.run()


# Unsigned types that ATen writes to places of no tensor, and signed ones of the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _signed(t: Tensor) -> Tensor:
    """A tensor whose words can be written, and added to one another, wherever they are."""
    return t.view(_SIGNED[t.dtype]) if t.dtype in _SIGNED else t


@dataclass(slots=True)
class _Run:
    function: TensorFunction
    tensors: dict[str, Tensor]
    sizes: dict[str, int]
    device: torch.device
    results: dict[str, Tensor] = field(default_factory=dict)
    shape: tuple[int, ...] = ()
    buffers: dict[str, Buffer] = field(default_factory=dict)
    # Values of the expression at hand: expressions share parts.
    memo: dict[int, Tensor] = field(default_factory=dict)
    # How many choices the value at hand is a branch of.
    guarded: int = 0

    def run(self) -> None:
        f = self.function
        self.shape = tuple(self.size(d.extent) for d in f.dims)
        self.buffers = {b.name: b for b in f.inputs}
        if math.prod(self.shape[: len(f.rows)]) == 0:
            return
        for stage in f.stages:
            if not stage.into:
                self.stage(stage)
        if any(o.buffer in f.inputs for o in f.outputs):
            # A result may be an input as it is, and must not change when that is written.
            self.results = {name: t.clone() for name, t in self.results.items()}
        for output in f.outputs:
            if output.buffer not in f.inputs or not f.scatters:  # else what it begins with is there
                self.store(output)
        for stage in f.stages:
            if stage.into:
                self.scatter(stage, next(o.buffer for o in f.outputs if o.result == stage.into))

    def scatter(self, stage: Stage, buffer: Buffer) -> None:
        """Combine a value for each point of a stage into the elements of a buffer that data name."""
        kept = self.places(self.function.axes_of(stage))
        shape = [n if k in kept else 1 for k, n in enumerate(self.shape)]
        value, *positions = (self.whole(v, {}).expand(shape).reshape(-1) for v in stage.values)
        offset = torch.zeros_like(value, dtype=torch.int64)
        span = 1
        for k, (place, extent, stride) in enumerate(zip(positions, buffer.shape, buffer.strides, strict=True)):
            size, step = self.size(extent), self.size(stride)
            outside = place[(place < 0) | (place >= size)]
            if len(outside):
                raise OutOfRangeError(f"index {int(outside[0])} is out of bounds for dimension {k} with size {size}")
            offset, span = offset + place.long() * step, span + (size - 1) * step
        flat = torch.as_strided(self.tensors[buffer.name], (max(span, 1),), (1,))
        value = value.to(flat.dtype)
        match stage.monoid.name if stage.monoid is not None else "":
            case "":
                _signed(flat)[offset] = _signed(value)
            case "sum":
                _signed(flat).index_put_((offset,), _signed(value), accumulate=True)
            case "any":
                flat[offset[value]] = True
            case "all":
                flat[offset[~value]] = False
            case "product" | "max" | "min" as name:
                flat.scatter_reduce_(0, offset, value, {"product": "prod", "max": "amax", "min": "amin"}[name])
            case name:
                raise FallbackError(f"no ATen op scatters by {name}")

    def stage(self, stage: Stage) -> None:
        if stage.monoid is None:
            for name, value in zip(stage.results, stage.values, strict=True):
                self.results[name] = self.whole(value, {})
            return
        f = self.function
        kept, over = self.places(f.axes_of(stage)), self.places(f.inner if stage.scan else f.over_of(stage))
        shape = [n if k in kept or k in over else 1 for k, n in enumerate(self.shape)]
        last = [k for k in range(len(shape)) if k not in over] + over
        end = len(shape) - len(over)  # there may be nothing to combine
        values = [self.whole(v, {}).expand(shape).permute(last).unsqueeze(end).flatten(end) for v in stage.values]
        dtypes = tuple(v.dtype for v in stage.values)
        if stage.scan:
            back = [last.index(k) for k in range(len(last))]
            for name, state in zip(stage.results, self.scan(stage.monoid, values, dtypes), strict=True):
                self.results[name] = state.reshape([shape[k] for k in last]).permute(back)
            return
        for name, state in zip(stage.results, self.combine(stage.monoid, values, dtypes), strict=True):
            self.results[name] = state.reshape([n if k in kept else 1 for k, n in enumerate(shape)])

    def places(self, dims: Sequence[Dim]) -> list[int]:
        """Where some dimensions stand among all."""
        return [k for k, d in enumerate(self.function.dims) if d in dims]

    def combine(self, monoid: Monoid, values: list[Tensor], dtypes: tuple[DType, ...]) -> list[Tensor]:
        """One state a row, by halving the last dimension, which keeps the order of elements."""
        if values[0].shape[-1] == 0:
            return [
                torch.full(v.shape[:-1], c.value, dtype=v.dtype, device=self.device)
                for v, c in zip(values, monoid.identity(dtypes), strict=True)
            ]
        if monoid.name == "sum" and dtypes[0] is not DType.BOOL:
            return [values[0].sum(-1, dtype=values[0].dtype)]
        combined = _combination(monoid, dtypes)
        while (n := values[0].shape[-1]) > 1:
            half = n // 2
            env = {f"a{k}": v[..., : 2 * half : 2] for k, v in enumerate(values)}
            env |= {f"b{k}": v[..., 1 : 2 * half : 2] for k, v in enumerate(values)}
            new = [self.whole(e, env).expand_as(env["a0"]) for e in combined]
            values = [torch.cat((x, v[..., 2 * half :]), -1) if n % 2 else x for x, v in zip(new, values, strict=True)]
        return [v[..., 0] for v in values]

    def scan(self, monoid: Monoid, values: list[Tensor], dtypes: tuple[DType, ...]) -> list[Tensor]:
        """The state up to each element of the last dimension, in as many steps as its length has bits.

        Source: Hillis and Steele, Data parallel algorithms, 1986.
        """
        combined, step = _combination(monoid, dtypes), 1
        while step < values[0].shape[-1]:
            env = {f"a{k}": v[..., :-step] for k, v in enumerate(values)}
            env |= {f"b{k}": v[..., step:] for k, v in enumerate(values)}
            new = [self.whole(e, env).expand_as(env["a0"]) for e in combined]
            values = [torch.cat((v[..., :step], x), -1) for x, v in zip(new, values, strict=True)]
            step *= 2
        return values

    def store(self, output: Output) -> None:
        f, target = self.function, self.tensors[output.buffer.name]
        value = self.results[output.result].to(output.buffer.dtype.torch)
        at = self.places(next(f.axes_of(s) for s in f.stages if output.result in s.results))
        shape = [self.shape[k] for k in at]
        value = value.reshape([value.shape[k] for k in at]).expand(shape)
        names = [f.dims[k].var for k in at]
        if set(output.indices) == set(names) and len(output.indices) == len(names):
            target.copy_(value.permute([names.index(i) for i in output.indices]).reshape(target.shape))
            return
        flat, offset = self.flat(output.buffer, output.indices, target)
        offset = offset.reshape([offset.shape[k] for k in at]).expand(shape)
        _signed(flat)[offset] = _signed(value)

    # --- sizes and indices ------------------------------------------------------------------------------------------

    def size(self, expr: sympy.Expr) -> int:
        return int(eval(index_text(expr, lambda s: str(self.sizes[s.name])), {"max": max, "min": min}))

    def index(self, index: Index, env: Env) -> Tensor:
        if is_value(index):
            return self.value(index, env).long()  # type: ignore[arg-type]
        names: dict[str, Any] = {"max": _fold(torch.maximum), "min": _fold(torch.minimum)}
        for s in index.free_symbols:
            names[s.name] = self.sizes[s.name] if s.name in self.sizes else self.axis(s)
        found = eval(index_text(index, lambda s: s.name), names)
        if isinstance(found, torch.Tensor):
            return found
        return torch.tensor(found, dtype=torch.int64, device=self.device).reshape((1,) * len(self.shape))

    def axis(self, var: sympy.Symbol) -> Tensor:
        k = [d.var for d in self.function.dims].index(var)
        shape = [1] * len(self.shape)
        shape[k] = -1
        return torch.arange(self.shape[k], device=self.device).reshape(shape)

    def flat(self, buffer: Buffer, indices: Sequence[Index], tensor: Tensor) -> tuple[Tensor, Tensor]:
        """The memory of a buffer as one row, and the place in it of every point of the domain."""
        shape = [self.size(e) for e in buffer.shape]
        strides = [self.size(s) for s in buffer.strides]
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        offset = torch.zeros((1,) * len(self.shape), dtype=torch.int64, device=self.device)
        for i, n, s in zip(indices, shape, strides, strict=True):
            offset = offset + self.index(i, {}).clamp(0, n - 1) * s
        return torch.as_strided(tensor, (max(span, 1),), (1,)), offset

    # --- values -----------------------------------------------------------------------------------------------------

    def whole(self, e: Expr, env: Env) -> Tensor:
        """The value of an expression that is not part of another."""
        self.memo = {}
        return self.value(e, env)

    def value(self, e: Expr, env: Env) -> Tensor:
        known = self.memo.get(id(e))
        if known is None:
            known = self.memo[id(e)] = self.compute(e, env)
        return known

    def compute(self, e: Expr, env: Env) -> Tensor:
        match e:
            case Const(value, dtype):
                t = torch.tensor(value, dtype=dtype.torch, device=self.device)
                return t.reshape((1,) * len(self.shape)) if not env else t
            case Var(name):
                return env[name]
            case IndexValue(index, dtype):
                return self.index(index, env).to(dtype.torch)
            case Cast(inner, dtype):
                return self.value(inner, env).to(dtype.torch)
            case Select(condition, if_true, if_false):
                chosen = self.value(condition, env)
                self.guarded += 1
                result = torch.where(chosen, self.value(if_true, env), self.value(if_false, env))
                self.guarded -= 1
                return result
            case Call("check_bounds", args, _):
                return self.checked(*(self.value(a, env) for a in args))
            case Call("check_divisor", (divisor,), _):
                return self.checked_divisor(self.value(divisor, env))
            case Call(fn, args, dtype) if fn in ITERATIONS:
                return self.iterated(fn, dtype, [self.value(a, env) for a in args])
            case Call(fn, args, dtype) if fn in INTRINSICS:
                return self.defined(fn, args[0].dtype.compute, [self.value(a, env) for a in args]).to(dtype.torch)
            case Call(fn, args, dtype):
                return _function(fn)(dtype, *(self.value(a, env) for a in args))
            case Load():
                return self.load(e)
        raise FallbackError(f"no ATen op computes {e}")

    def defined(self, fn: str, dtype: DType, args: list[Tensor]) -> Tensor:
        """A function of a user's, by its formula."""
        meaning, memo = definition(INTRINSICS[fn], dtype), self.memo
        env = {v.name: a.to(dtype.torch) for v, a in zip(meaning.args, args, strict=True)}
        for let, e in meaning.lets:
            env[let.name] = self.whole(e, env)
        result = self.whole(meaning.result, env)
        self.memo = memo
        return result

    def iterated(self, fn: str, dtype: DType, args: list[Tensor]) -> Tensor:
        """A function that its steps define: elements that have ended keep their state while others go on."""
        loop, memo = iteration(fn, dtype.compute), self.memo
        wide = torch.broadcast_tensors(*(a.to(dtype.compute.torch) for a in args))
        env = dict(zip([v.name for v in loop.args], wide, strict=True))
        state = [self.whole(e, env).expand_as(wide[0]) for e in loop.start]
        while True:
            env |= zip([v.name for v in loop.state], state, strict=True)
            active = self.whole(loop.condition, env)
            if not bool(active.any()):
                break
            state = [torch.where(active, self.whole(e, env), v) for e, v in zip(loop.step, state, strict=True)]
        result = self.whole(loop.result, env).to(dtype.torch)
        self.memo = memo
        return result

    def checked(self, index: Tensor, low: Tensor, high: Tensor, dim: Tensor) -> Tensor:
        """An index that is in range; in a branch of a choice it may be one that is not taken, which loads clamp."""
        wrong = (index < low) | (index >= high)
        if not self.guarded and bool(wrong.any()):
            first, size = (int(t.broadcast_to(wrong.shape)[wrong][0]) for t in (index, high))
            raise OutOfRangeError(f"index {first} is out of bounds for dimension {int(dim)} with size {size}")
        return index

    def checked_divisor(self, divisor: Tensor) -> Tensor:
        """A divisor that is not zero; in a branch of a choice it may be one, where it is not taken."""
        zero = divisor == 0
        if not self.guarded and bool(zero.any()):
            raise DivisionByZeroError("ZeroDivisionError: an integer is divided by zero")
        return torch.where(zero, torch.ones_like(divisor), divisor)

    def load(self, e: Load) -> Tensor:
        if e.buffer in self.results:
            return self.made(e)
        buffer, tensor = self.buffers[e.buffer], self.tensors[e.buffer]
        if tensor.numel() == 0:
            return torch.zeros((1,) * len(self.shape), dtype=tensor.dtype, device=self.device)
        names = [d.var for d in self.function.dims]
        moving = [i for i in e.indices if i != 0]
        if all(i in names for i in moving if not is_value(i)) and len(set(moving)) == len(moving):
            if not any(is_value(i) for i in moving) and self.covers(buffer, e.indices):
                shape, strides = [1] * len(names), [0] * len(names)
                for i, s in zip(e.indices, buffer.strides, strict=True):
                    if i != 0:
                        shape[names.index(i)], strides[names.index(i)] = self.shape[names.index(i)], self.size(s)
                return torch.as_strided(tensor, shape, strides)
        flat, offset = self.flat(buffer, e.indices, tensor)
        return flat[offset]

    def made(self, e: Load) -> Tensor:
        """What a stage has made, of which a reader may want the first along dimensions that it lacks itself, or others
        than its own: rows are summed in groups."""
        result, f = self.results[e.buffer], self.function
        axes = f.axes_of(next(s for s in f.stages if e.buffer in s.results))
        if any(i not in (0, d.var) for d, i in zip(axes, e.indices, strict=True)):
            lengths = [result.shape[k] for k in self.places(axes)]
            places = [self.index(i, {}).clamp(0, n - 1) for i, n in zip(e.indices, lengths, strict=True)]
            return result.reshape(lengths)[tuple(places)]
        for d, i in zip(axes, e.indices, strict=True):
            if i == 0 and result.shape[k := f.dims.index(d)] > 1:
                result = result.narrow(k, 0, 1)
        return result

    def covers(self, buffer: Buffer, indices: Sequence[Index]) -> bool:
        """Whether a buffer is at least as long as the dimensions that index it."""
        extents = {d.var: n for d, n in zip(self.function.dims, self.shape, strict=True)}
        return all(i == 0 or extents[i] <= self.size(n) for i, n in zip(indices, buffer.shape, strict=True))


# --- the table ------------------------------------------------------------------------------------------------------


def _combination(monoid: Monoid, dtypes: Sequence[DType]) -> Sequence[Expr]:
    """The combination of a state of variables a0, a1, … and a later one of b0, b1, …"""
    a, b = (tuple(Var(f"{x}{k}", d) for k, d in enumerate(dtypes)) for x in "ab")
    return monoid.combine(a, b)


def _fold(fn: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def over(*args: Any) -> Any:
        tensors = [a if isinstance(a, torch.Tensor) else torch.tensor(a) for a in args]
        result = tensors[0]
        for t in tensors[1:]:
            result = fn(result, t)
        return result

    return over


_RENAMED: dict[str, Callable[..., Tensor]] = {
    "div": torch.true_divide,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fma": lambda a, b, c: torch.addcmul(c, a, b),
    "erf": torch.special.erf,
    "erfc": torch.special.erfc,
    "erfinv": torch.special.erfinv,
    "digamma": torch.special.digamma,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "bit_not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}


def _function(fn: str) -> Callable[..., Tensor]:
    match fn:
        case "bitcast":
            return lambda dtype, a: a.contiguous().view(dtype.torch)
        case "rand":
            return lambda dtype, seed, offset: (random_words(seed, offset) >> 8).to(torch.float32) * 2.0**-24
        case "randn":
            return _randn
        case "randbits":
            return lambda dtype, seed, offset: random_words(seed, 2 * offset + 1) << 32 | random_words(seed, 2 * offset)
        case _ if fn in APPROXIMATIONS:
            return _function(APPROXIMATIONS[fn].of)
    op = _RENAMED.get(fn) or getattr(torch, fn, None)
    if op is None:
        raise FallbackError(f"no ATen op computes {fn!r}")
    return lambda dtype, *args: op(*args)


def _randn(dtype: DType, seed: Tensor, offset: Tensor) -> Tensor:
    w0, w1 = random_words(seed, 2 * offset), random_words(seed, 2 * offset + 1)
    u1, u2 = ((w0 >> 8) + 1).double() * 2.0**-24, (w1 >> 8).double() * 2.0**-24
    return (torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2.0 * math.pi * u2)).to(dtype.torch)


def random_words(seed: Tensor, places: Tensor) -> Tensor:
    """The words at places of the streams of seeds (``ir.expr.ops``), int64, broadcast."""
    w0, w1, w2, w3 = philox(seed, places >> 2)
    which = places & 3
    return torch.where(which < 2, torch.where(which == 0, w0, w1), torch.where(which == 2, w2, w3))


def philox(seed: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10 for keys ``seed`` and counters ``(offset, 0)``, int64, broadcast."""
    # Products wrap to 64 bits, and masks after shifts make the words unsigned.
    mask = 0xFFFFFFFF
    seed, offset = torch.broadcast_tensors(seed, offset)
    k0, k1 = seed & mask, seed >> 32 & mask
    c0, c1 = offset & mask, offset >> 32 & mask
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (high >> 32 & mask) ^ c1 ^ k0, high & mask, (low >> 32 & mask) ^ c3 ^ k1, low & mask,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
