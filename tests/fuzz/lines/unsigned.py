"""Unsigned integers of more than eight bits, of which eager knows few operations."""

from __future__ import annotations

import torch

from .indexing import places_along
from .maker import UNSIGNED, Draft, Info, Maker

ONE = (
    "{a} * 3", "{a} & 5", "{a} | 6", "{a} ^ 3", "{a} * {a}", "{a} / 3", "{a} == 2", "{a} != 3", "{a} + 0.5",
    "{a}.sum(0)", "{a}.sum()", "{a}.prod(-1)", "{a}.cumsum(-1)", "torch.any({a}, -1)", "{a}.to(torch.int64) - 2",
    "{a}.to(torch.int32) + 1", "{a}.to(torch.uint8)", "{a}.to(torch.int16)", "{a}.float()", "{a}.to(torch.float16) * 2",
    "{a}.double() / 7", "{a}.bool()", "torch.full_like({a}, 3)", "torch.zeros_like({a})", "{a}.clone()",
    "torch.where({a} == 1, {a}, 7)", "{a} * True", "torch.nan_to_num({a})", "F.pad({a}, (1, 2), value=3)",
    "({a} * {a}).sum(-1)", "{a}.sum(-1, dtype=torch.int32)", "{a} * torch.ones(())", "{a} & ({a} ^ 1)",
)  # fmt: skip
VIEWS = (
    "torch.cat([{a}, {a} * 2])", "{a}.flip(0)", "{a}.roll(1, 0)", "{a}.repeat_interleave(2, 0)",
    "torch.stack([{a}, {a}], -1)",
    "{a}[..., ::2]", "{a}.sort(-1)[0]", "{a}.repeat(*([2] * {a}.ndim))", "{a}.transpose(0, -1) * 1",
)  # fmt: skip
TWO = (
    "{a} * {b}", "{a} & {b}", "{a} | {b}", "{a} ^ {b}", "{a} == {b}", "{a} != {b}", "{a} / ({b} | 1)",
    "torch.where({a} == {b}, {a}, {b})", "torch.cat([{a}, {b}], -1)", "({a} * {b}).sum(0)",
)  # fmt: skip
FROM = {
    torch.uint16: ("int16", "uint8"), torch.uint32: ("int32", "uint16", "float32"), torch.uint64: ("int64", "uint32"),
}  # fmt: skip
WRITES = ("{t}.fill_(5)", "{t}.zero_()", "{t}.mul_(3)", "{t}[..., :1] = 9", "{t}[0] *= 2", "{t}.bitwise_xor_(5)")


def unsigned(i: Info) -> bool:
    return i.dtype in UNSIGNED


def value(m: Maker) -> Info:
    """A value of these types: one that is there, or one that is made of another, or an input."""
    if m.chance(0.6) and any(map(unsigned, map(m.info, m.names))):
        return m.pick(unsigned)
    like = m.pick(lambda i: True)
    kind = m.rng.choice(UNSIGNED)
    return m.fresh(like.shapes, kind, "range" if m.chance(0.4) else "eighths")


def one(m: Maker) -> Draft:
    a = value(m)
    table = VIEWS if a.ndim and m.chance(0.25) else ONE
    return m.choose(table, exact=True, a=a)


def two(m: Maker) -> Draft:
    a = value(m)
    b = m.fresh(a.shapes, a.dtype, "range" if m.chance(0.4) else "eighths")
    return m.choose(TWO, exact=True, a=a, b=b)


def gathered(m: Maker) -> Draft:
    a = m.pick(unsigned, lambda i: i.ndim >= 1 and i.has(0))
    at, _ = places_along(m, a, 0, [(3,)] * len(m.sizes))
    text = m.rng.choice((f"{a.name}[{at}]", f"{a.name}[{at}] * 2", f"torch.index_select({a.name}, 0, {at})"))
    return m.draft(text, exact=True)


def made(m: Maker) -> Draft:
    """Values of these types made of others, by value or by their memory."""
    a = m.pick(lambda i: i.is_bool or (i.is_integer and i.within(0, 100)) or unsigned(i))
    if unsigned(a) and a.ndim and a.has(-1):
        return m.draft(f"{a.name}.view(torch.{m.rng.choice(FROM[a.dtype])})", kind="view")
    return m.draft(f"{a.name}.to({m.rng.choice(UNSIGNED)})", exact=True)


def written(m: Maker) -> Draft:
    return m.write(WRITES, m.pick(unsigned))


UNSIGNED_INTEGERS = ((3.0, one), (1.0, two), (0.7, gathered), (1.0, made), (0.7, written))
