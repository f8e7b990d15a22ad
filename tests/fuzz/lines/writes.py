"""Writes to values and inputs, through views too. What is written never lies in the memory that is written to: eager
leaves open in which order elements are read and written there.
"""

from __future__ import annotations

import torch

from .elementwise import partner
from .indexing import places_along
from .maker import Draft, Info, Maker, NoFit

PLAIN = (
    "{t}.mul_(2)",
    "{t}.add_(1)",
    "{t}.neg_()",
    "{t}.zero_()",
    "{t}.fill_(0.5)",
    "{t}.abs_()",
    "{t}.clamp_(-1, 1)",
    "{t}.square_()",
    "{t} *= 0.5",
    "{t} += 1",
    "{t}.sub_(0.5)",
)
SMOOTH = ("{t}.tanh_()", "{t}.sigmoid_()", "{t}.mul_(0.3)", "{t}.sin_()", "F.silu({t}, inplace=True)", "{t}.div_(3)")
PARTS = (
    "{t}[0] = 1",
    "{t}[..., ::2] *= 2",
    "{t}[1:] += 1",
    "{t}[..., -1] = 0",
    "{t}[:1].mul_(3)",
    "{t}[..., :2].neg_()",
    "{t}.view(-1)[:2].zero_()",
    "{t}[0].add_(2)",
    "{t}.t()[0].mul_(2)",
    "{t}.diagonal().fill_(2)",
    "{t}.unsqueeze(0).add_(1)",
    "{t}.transpose(0, -1)[1:].mul_(2)",
    "{t}[..., 1:-1].mul_(0.5)",
    "{t}.select(0, -1).add_(1)",
    "{t}.narrow(0, 0, 1).fill_(3)",
    "{t}.reshape(-1)[::3] = 2",
    "{t}.flatten()[1:2] += 1",
    "{t}.movedim(0, -1)[..., 0] = 5",
    "{t}.chunk(2, 0)[0].mul_(2)",
    "{t}.unfold(-1, 2, 2)[..., 0].zero_()",
    "torch.diagonal({t}, 1).add_(1)",
    "{t}.squeeze()[..., :1].neg_()",
    "{t}[:, None][:, :, 1:] = 4",
)
# What a write makes another shape or order of.
TURNS = ("{t}.t_()", "{t}.unsqueeze_(0)", "{t}.squeeze_()", "{t}.transpose_(0, -1)")
ORDERED = ("{t}.cumsum_(0)", "{t}.fill_diagonal_(3)", "{t}.tril_()", "{t}.triu_(1)", "{t}.relu_()", "{t}.clamp_min_(0)")
INTEGRAL = ("{t}.bitwise_xor_(3)", "{t} //= 3", "{t} %= 5", "{t} <<= 1", "{t}.bitwise_not_()", "{t}.mul_(100)")
LOGICAL = ("{t}.logical_not_()", "{t} ^= True", "{t}.fill_(False)", "{t}[..., ::2] = True", "{t}[1:] |= True")
WITH = (
    "{t}.add_({b})",
    "{t}.mul_({b})",
    "{t}.copy_({b})",
    "{t}.sub_({b}, alpha=2)",
    "{t}[:] = {b}",
    "{t} += {b}",
    "{t} *= {b}",
    "torch.maximum({t}, {b}, out={t})",
    "torch.add({t}, {b}, out={t})",
    "torch.mul({b}, 2, out={t})",
    "{t}[..., ::2] = {b}[..., ::2]",
    "{t}[1:].copy_({b}[:-1])",
    "{t}[..., 0] += {b}[..., -1]",
    "{t}.transpose(0, -1).copy_({b}.transpose(0, -1))",
    "{t}.sub_({b}.mean(0))",
    "{t}.masked_fill_({b} > 0, 1)",
    "{t}.copy_({b}.cumsum(0))",
    "{t}.add_({b}.tanh())",
    "{t}.addcmul_({b}, {b}, value=0.5)",
    "{t}.lerp_({b}, 0.5)",
    "{t}.copy_({b}.flip(0))",
)


def target(m: Maker) -> Info:
    def writable(i: Info) -> bool:
        if m.gradient and any(x.name == i.name and x.grad for x in m.inputs):
            return False
        return i.dtype is not torch.complex64

    return m.pick(writable)


def apart(m: Maker, a: str, b: str) -> bool:
    """Whether two values lie in memory of their own."""
    return all(e[a].untyped_storage().data_ptr() != e[b].untyped_storage().data_ptr() for e, _ in m.spaces)


def whole(m: Maker) -> Draft:
    t = target(m)
    table = INTEGRAL if t.is_integer else LOGICAL if t.is_bool else ORDERED
    if m.chance(0.4):
        return m.write(table, t)
    if m.chance(0.1) and all(i.name != t.name for i in m.inputs):
        return m.write(TURNS, t)
    smooth = t.is_float and t.within(-40, 40) and m.chance(0.4)
    return m.write(SMOOTH if smooth else PLAIN, t, exact=not smooth)


def part(m: Maker) -> Draft:
    t = target(m)
    if not t.ndim:
        raise NoFit
    return m.write(PARTS, t)


def by_other(m: Maker) -> Draft:
    t = target(m)
    b = partner(m, t)
    if not apart(m, t.name, b.name):
        raise NoFit
    text = m.rng.choice(WITH)
    if " > 0" in text and not b.sure:
        raise NoFit
    if not t.is_float and b.is_float and not (b.sure and b.within(0, 100)):
        raise NoFit
    return Draft(
        text.format(t=t.name, b=b.name), (t.name, b.name), 0, "write", not any(w in text for w in ("tanh", "mean"))
    )


def at_places(m: Maker) -> Draft:
    t = target(m)
    if not t.ndim or not t.has(0):
        raise NoFit
    places, read = places_along(m, t, 0, [(3,)] * len(m.sizes))
    if read is not None and not apart(m, t.name, read):
        raise NoFit
    text = m.rng.choice(
        (
            f"{t.name}[{places}] = 1",
            f"{t.name}.index_fill_(0, {places}, 2)",
            f"{t.name}.index_add_(0, {places}, torch.ones_like({t.name}[:3]))",
            f"{t.name}.index_put_(({places},), torch.ones((), dtype={t.dtype}), accumulate=True)",
            f"{t.name}.scatter_(0, {places}{'[:, None]' * (t.ndim - 1)}, 1)",
            f"{t.name}[{places}, ..., :1] = 3",
        )
    )
    return Draft(text, (t.name, read or places), 0, "write", True)


def at_mask(m: Maker) -> Draft:
    t = target(m)
    mask = partner(m, t, dtype=torch.bool)
    if not apart(m, t.name, mask.name):
        raise NoFit
    text = m.rng.choice(
        (f"{t.name}.masked_fill_({mask.name}, 2)", f"{t.name}[{mask.name}] = 0", f"{t.name}[{mask.name}] += 1")
    )
    return Draft(text, (t.name, mask.name), 0, "write", True)


WRITES = ((3.0, whole), (3.0, part), (3.0, by_other), (1.0, at_places), (1.0, at_mask))
