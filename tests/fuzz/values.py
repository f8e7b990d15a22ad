"""What random programs are fed with: small numbers that float32 and half types hold exactly, and positions.

The functions named here, and no others, are what the text of a program may call besides torch. Each has a counterpart
for references in double precision: the same numbers (of the narrow type, if it rounds them) in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.decorators import maybe_mark_dynamic
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from torch.utils.checkpoint import checkpoint

from ..settings import default_dtype

# What makes a bool of a predicate.
Decide: TypeAlias = "Callable[[Any], bool]"
WIDE = {
    torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int, kind: str = "eighths") -> Tensor:
    """A tensor of numbers. ``kind``: ``eighths`` (-2 to 2), ``normal``, ``special`` (with infinities and NaN),
    ``range`` (all of an integer type).
    """
    rng = np.random.default_rng(seed)
    shape = tuple(shape)
    if dtype is torch.bool:
        return torch.from_numpy(np.asarray(rng.random(shape) < 0.5))
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        if kind == "range":
            kind_of = np.uint64 if limits.max > 2**63 else np.int64
            found = rng.integers(limits.min, limits.max, shape, endpoint=True, dtype=kind_of)
            return torch.from_numpy(np.asarray(found)).to(dtype)
        return torch.from_numpy(np.asarray(rng.integers(max(-8, limits.min), 9, shape))).to(dtype)
    if dtype.is_complex:
        parts = [np.asarray(rng.integers(-16, 17, shape) / 8) for _ in range(2)]
        return torch.complex(*(torch.from_numpy(p) for p in parts)).to(dtype)
    if kind == "normal":
        return torch.from_numpy(np.asarray(rng.standard_normal(shape))).to(dtype)
    found = np.asarray(rng.integers(-16, 17, shape) / 8)
    if kind == "special":
        odd = rng.choice(np.array([np.inf, -np.inf, np.nan, 0.0, -0.0]), shape)
        found = np.where(rng.random(shape) < 0.2, odd, found)
    return torch.from_numpy(np.asarray(found)).to(dtype)


def places(shape: Sequence[int], bound: int, seed: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Positions below ``bound``, which is at least 1 where there are any."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.asarray(rng.integers(0, max(bound, 1), tuple(shape)))).to(dtype)


def order(n: int, seed: int) -> Tensor:
    """The positions below ``n``, each once, in some order."""
    return torch.from_numpy(np.random.default_rng(seed).permutation(n))


def rand(like: Tensor) -> Tensor:
    """Random numbers in float32 of a tensor's shape."""
    return torch.rand(like.shape, dtype=torch.float32, device=like.device)


def wide_numbers(shape: Sequence[int], dtype: torch.dtype, seed: int, kind: str = "eighths") -> Tensor:
    """``numbers`` in double precision."""
    return numbers(shape, dtype, seed, kind).to(WIDE.get(dtype, dtype))


def wide_rand(like: Tensor) -> Tensor:
    """``rand`` in double precision: the same numbers."""
    return rand(like).double()


def drawn(fill: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """What a function makes of an empty tensor in float32 of a tensor's shape."""
    return fill(torch.empty(like.shape, dtype=torch.float32, device=like.device))


def wide_drawn(fill: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """``drawn`` in double precision: the same numbers."""
    with default_dtype(torch.float32):
        return drawn(fill, like).double()


def coins(p: Tensor) -> Tensor:
    """Ones with these probabilities, and zeros."""
    return torch.bernoulli(p.float()).to(p.dtype)


def plain_cond(
    decide: Decide, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], operands: tuple[Any, ...]
) -> Any:
    """``torch.cond`` as Python has it; torch's own compiles even where nobody asked."""
    return yes(*operands) if decide(predicate) else no(*operands)


def plain_while_loop(
    decide: Decide, condition: Callable[..., Any], body: Callable[..., Any], carried: tuple[Any, ...]
) -> Any:
    """``while_loop`` as Python has it."""
    while decide(condition(*carried)):
        carried = body(*carried)
    return carried


def plain_associative_scan(combine: Callable[..., Any], x: Tensor, dim: int) -> Tensor:
    """``associative_scan`` as Python has it."""
    rows = list(x.unbind(dim))
    for k in range(1, len(rows)):
        rows[k] = combine(rows[k - 1], rows[k])
    return torch.stack(rows, dim)


def narrow_associative_scan(combine: Callable[..., Any], x: Tensor, dim: int) -> Tensor:
    """torch's own, which compiles where nobody asked."""
    result: Tensor = associative_scan(combine, x, dim, combine_mode="generic")
    return result


def plain_scan(step: Callable[..., Any], state: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``scan`` over the first dimension as Python has it."""
    found = []
    for row in rows.unbind(0):
        state, result = step(state, row)
        found.append(result)
    return state, torch.stack(found)


def plain_mapped(fn: Callable[..., Any], rows: Tensor) -> Tensor:
    """``map`` as Python has it."""
    return torch.stack([fn(row) for row in rows.unbind(0)])


def flex(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Any = None) -> Tensor:
    """Attention whose scores pass through a function; ``mask`` says which positions are seen."""
    seen = None if mask is None else create_block_mask(mask, None, q.shape[1], q.shape[2], k.shape[2], device="cpu")
    result: Tensor = flex_attention(q, k, v, score_mod=score, block_mask=seen)
    return result


def plain_flex(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Any = None) -> Tensor:
    """``flex`` by its definition; torch's own compiles even where nobody asked. Rows that see nothing are zero."""
    b, h, i, j = (
        torch.arange(n).view(*([-1 if d == k else 1 for d in range(4)]))
        for k, n in enumerate((*q.shape[:3], k.shape[2]))
    )  # fmt: skip
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = (q.to(wide) @ k.to(wide).mT) / q.shape[-1] ** 0.5
    if score is not None:
        scores = score(scores, b, h, i, j).to(wide)
    if mask is not None:
        scores = scores.masked_fill(~mask(b, h, i, j), -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(nan=0.0)
    return (weights.to(q.dtype) @ v).to(q.dtype)


def in_bfloat16(fn: Callable[..., Any], *operands: Tensor) -> Any:
    """A function under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return fn(*operands)


def wide_in_bfloat16(fn: Callable[..., Any], *operands: Tensor) -> Any:
    """``in_bfloat16`` in double precision."""
    return fn(*operands)


def recomputed(fn: Callable[..., Any], *operands: Tensor) -> Any:
    """A function that the backward calls again."""
    return checkpoint(fn, *operands, use_reentrant=False)


def layered(fn: Callable[..., Any], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A function applied once for each row of weights, to what it made of the row before; and what it made half way."""
    made = [x]
    for k, w in enumerate(weights.unbind(0)):
        made.append(fn(made[-1], w, k))
    return made[-1], made[len(made) // 2]


def held(fn: Callable[..., Any], *operands: Tensor) -> Any:
    """A function through which no gradient flows."""
    with torch.no_grad():
        return fn(*operands)


class Limited(torch.autograd.Function):
    """Twice a tensor, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1) * 2


@torch.library.custom_op("mlc_fuzz::thrice", mutates_args=())
def thrice(x: Tensor) -> Tensor:
    """An op of the user's, with a gradient."""
    return x.clone(memory_format=torch.contiguous_format) * 3


@thrice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


thrice.register_autograd(lambda ctx, gradient: gradient * 3)


@torch.library.custom_op("mlc_fuzz::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    """An op of the user's that writes."""
    x.mul_(2)


@torch.library.custom_op("mlc_fuzz::kept", mutates_args=())
def kept(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """An op of the user's with a number and two results."""
    return x[:rows].clone(), x * rows


@kept.register_fake
def _(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x[:rows]), torch.empty_like(x)


def _kept_backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
    found = second * ctx.rows
    padded = torch.cat([first, torch.zeros_like(found[first.shape[0] :])])
    return found + padded, None


kept.register_autograd(_kept_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "rows", inputs[1]))


@torch.library.custom_op("mlc_fuzz::moved_", mutates_args=("x", "y"))
def moved_(x: Tensor, y: Tensor) -> Tensor:
    """An op of the user's that writes two tensors and makes a third."""
    x.add_(1)
    y.mul_(2)
    return x.sum()


@moved_.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(())


def varied(x: Tensor, *dims: int) -> Tensor:
    """A tensor of which some dimensions are other ones at other calls, as its maker says to torch."""
    for d in dims:
        maybe_mark_dynamic(x, d)
    return x


def same(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function."""
    return fn


def namespace(*, wide: bool = False, compiled: bool = False, decide: Decide = bool) -> dict[str, Any]:
    """The names that a program's text refers to; a new dictionary. ``decide`` says which way predicates lead where
    nothing is ``compiled``.
    """
    return {
        "torch": torch, "F": F, "__name__": __name__, "bool": decide,
        "numbers": wide_numbers if wide else numbers, "places": places, "order": order,
        "rand": wide_rand if wide else rand, "recomputed": recomputed, "held": held,
        "layered": layered,
        "drawn": wide_drawn if wide else drawn, "coins": coins, "kept": kept, "moved_": moved_, "varied": varied,
        "flex": flex if compiled else plain_flex, "mapped": map_rows if compiled else plain_mapped,
        "once": torch.compiler.nested_compile_region if compiled else same, "adamw": adamw, "sgd": sgd,
        "limited": Limited.apply, "thrice": thrice, "double_": double_,
        "in_bfloat16": wide_in_bfloat16 if wide else in_bfloat16,
        "cond": torch.cond if compiled else partial(plain_cond, decide),
        "while_loop": while_loop if compiled else partial(plain_while_loop, decide),
        "associative_scan": narrow_associative_scan if compiled else plain_associative_scan,
        "scan": scan if compiled else plain_scan,
    }  # fmt: skip
