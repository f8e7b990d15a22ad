"""Inputs that are made of others, or that lie in memory in odd ways: the same tensor twice, views of another input,
elements that share memory, results of what autograd has recorded.
"""

from __future__ import annotations

import torch

from .maker import FLOATS, Info, Maker, NoFit

TIED = ("{x}", "{x}.detach()", "{x}.detach().view_as({x})", "{x}.detach()[:]", "{x}.detach().transpose(0, -1)",
        "{x}.detach()[1:]", "{x}.detach()[::2]", "{x}.detach()[..., :1]", "{x}.detach().unsqueeze(0)",
        "{x}.detach()[:-1]", "{x}.detach().flatten()", "{x}.detach().expand(2, *{x}.shape)")  # fmt: skip
# Tensors that autograd has made.
GROWN = ("{x} * 1", "{x}.clone()", "({x} * 2)[:]", "({x} + 0).transpose(0, -1)", "({x} * 1)[..., :1]",
         "{x}.unsqueeze(0) * 1",
         "({x} * 1)[1:]", "({x} - 0).detach()", "{x}.sum(0, keepdim=True).expand_as({x})")  # fmt: skip


def tied(m: Maker) -> Info:
    """A further name for an input, or a view of it."""
    other = m.info(m.rng.choice([i.name for i in m.inputs if i.name not in m.plain]))
    return m.input(_text(m, other, TIED), other.dtype, constant=True)


def grown(m: Maker) -> Info:
    """What autograd has made of an input: it is no leaf, and it may be written."""
    found = [i for i in m.inputs if i.grad]
    if not found:
        raise NoFit
    other = m.info(m.rng.choice(found).name)
    return m.input(_text(m, other, GROWN), other.dtype, constant=True)


def _text(m: Maker, other: Info, texts: tuple[str, ...]) -> str:
    if not other.ndim:
        return texts[0].format(x=other.name)
    return m.rng.choice(texts).format(x=other.name)


def negated(m: Maker) -> Info:
    """What is the negative of its memory, for autograd as well."""
    dtype = m.rng.choice((torch.float32, torch.float64, torch.int64, torch.bfloat16))
    shape = f"({m.rng.choice('ABC')}, {m.rng.choice('ABC')})"
    texts = [f"torch._neg_view(numbers({shape}, {dtype}, {m.seed}))",
             f"torch._neg_view(numbers({shape}, {dtype}, {m.seed})).t()"]  # fmt: skip
    if dtype in (torch.float32, torch.float64):
        made = f"numbers({shape}, {dtype}, {m.seed})"
        texts.append(f"torch.complex({made}, {made}).conj().imag")
    return m.input(m.rng.choice(texts), dtype, constant=m.chance(0.5))


def overlapping(m: Maker) -> Info:
    """Elements that share memory."""
    dtype = m.rng.choice((*FLOATS, torch.int64))
    a, b = m.rng.choice("ABC"), m.rng.choice((2, 3, 5))
    text = m.rng.choice((
        f"numbers(({a} + {b}, ), {dtype}, {m.seed}).unfold(0, {b}, 1)",
        f"numbers(({a} + {b} + 1, ), {dtype}, {m.seed}).as_strided(({a}, {b}), (1, 1), 1)",
        f"numbers(({a} + {b}, ), {dtype}, {m.seed}).as_strided(({a}, {b}), (1, 0))",
        f"numbers(({a}, {a}), {dtype}, {m.seed}).diagonal().expand({b}, {a})",
        f"numbers((2 * {a} + {b}, ), {dtype}, {m.seed}).as_strided(({b}, {a}), (1, 2))",
        f"numbers(({a} + {b}, 4), {dtype}, {m.seed}).unfold(0, {b}, 1)",
    ))  # fmt: skip
    return m.input(text, dtype, constant=m.chance(0.5))
