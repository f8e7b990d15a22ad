"""Random instances of each rule: a program in which the rule has something to do, and its inputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Program = Callable[..., object]


@dataclass(frozen=True)
class Instance:
    """A function of tensors, their shapes, and of those that are indices how many there are to choose from."""

    program: Program
    shapes: tuple[tuple[int, ...], ...]
    choices: tuple[int, ...]

    def inputs(self, rng: random.Random, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> list[Tensor]:
        """Random inputs: normal numbers, and indices."""
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        return [
            torch.randn(s, generator=generator, dtype=torch.float64).mul(scale).to(dtype)
            if not c else torch.randint(c, s, generator=generator)
            for s, c in zip(self.shapes, self.choices, strict=True)
        ]  # fmt: skip


def of(program: Program, *shapes: tuple[int, ...], choices: Mapping[int, int] | None = None) -> Instance:
    found = choices or {}
    return Instance(program, shapes, tuple(found.get(k, 0) for k in range(len(shapes))))


def sizes(rng: random.Random, count: int, least: int = 1) -> list[int]:
    """Sizes up to seven, none of them now and then."""
    return [0 if least == 0 and rng.random() < 0.08 else rng.randint(max(least, 1), 7) for _ in range(count)]


def narrow_product(rng: random.Random) -> Instance:
    """A part of a product's rows or columns, or chosen rows, of a plain or a batched product, with an addend or not."""
    b, m, k, n = sizes(rng, 4, 0)
    m, n = m + 1, n + 1
    start, row = rng.randrange(n), rng.randrange(m)
    kind = rng.randrange(5)
    if kind == 0:
        return of(lambda x, w: (x @ w)[:, row], (b, m, k), (k, n))
    if kind == 1:
        return of(lambda x, w: (x @ w)[..., start:] * 2, (m, k), (k, n))
    if kind == 2:
        return of(lambda x, w: (x @ w).mT[:, start], (b, m, k), (b, k, n))
    if kind == 3:
        return of(lambda x, w, c: torch.addmm(c, x, w)[row:], (m, k), (k, n), (n,))
    return of(lambda x, w, i: (x @ w)[i], (m, k), (k, n), (min(m, 2),), choices={2: m})


def look_up_later(rng: random.Random) -> Instance:
    """Rows of a table, chosen more often than there are, in front of a product; transposed, or with an addend."""
    v, k, n = sizes(rng, 3)
    rows = (v + rng.randint(1, 4),) if rng.random() < 0.5 else (2, v)
    kind = rng.randrange(3)
    look = torch.nn.functional.embedding
    if kind == 0:
        return of(lambda t, i, w: look(i, t) @ w, (v, k), rows, (k, n), choices={1: v})
    if kind == 1:
        return of(lambda t, i, w: w @ look(i, t).flatten(0, -2).mT, (v, k), rows, (n, k), choices={1: v})
    return of(
        lambda t, i, w, c: torch.addmm(c, look(i, t).flatten(0, -2), w), (v, k), rows, (k, n), (n,), choices={1: v}
    )


def reorder(rng: random.Random) -> Instance:
    """Three factors and more, with views, repeated heads, numbers, and factors of rows and of columns."""
    b, m, k, j, n = sizes(rng, 5, 0)
    kind = rng.randrange(6)
    if kind == 0:
        return of(lambda x, y, z: x @ y @ z, (b, m, k), (k, j), (j, n))
    if kind == 1:
        return of(lambda x, y, z: x @ (y @ z * 0.5).mT, (m, k), (n, j), (j, k))
    if kind == 2:
        return of(lambda x, r, w: (x * r[:, None]) @ w, (m, k), (m,), (k, n))
    if kind == 3:
        return of(lambda x, c, w: (c * x) @ w, (b, m, k), (k,), (b, k, n))
    if kind == 4:
        return of(lambda a, d, x, w: (d[:, None] * a * d) @ (x @ w), (m, m), (m,), (m, k), (k, n))
    return of(
        lambda q, y, z: q @ (y @ z).view(-1, 2, 3)[:, :, None].expand(-1, -1, 2, -1).flatten(1, 2).permute(1, 2, 0),
        (4, m, 3), (n, k), (k, 6),
    )  # fmt: skip


def distribute(rng: random.Random) -> Instance:
    """An operand that is a sum or a concatenation, with a term that is a product or the same for many rows."""
    b, m, k, j, n = sizes(rng, 5)
    kind = rng.randrange(5)
    if kind == 0:
        return of(lambda x, w, y, z: x @ (w + y @ z), (m, k), (k, n), (k, j), (j, n))
    if kind == 1:
        return of(lambda x, w, y, z: x @ (w - 2 * (y @ z)).mT, (b, m, k), (n, k), (n, j), (j, k))
    if kind == 2:
        return of(lambda x, y, w: (x[:, None] + y[None]) @ w, (b, k), (m, k), (k, n))
    if kind == 3:
        return of(lambda x, g, w: torch.cat([x, g[:, None].expand(-1, m, -1)], -1) @ w, (b, m, k), (b, j), (k + j, n))
    return of(lambda x, y, w, z: torch.cat([x, y @ z], 1) @ w, (m, k), (m, j), (k + n, b), (j, n))


def sum_first(rng: random.Random) -> Instance:
    """Sums of a product's results along rows, columns or the batch."""
    b, m, k, n = sizes(rng, 4, 0)
    d = rng.randrange(3)
    if rng.random() < 0.5:
        return of(lambda x, w: (x @ w).sum(d), (b, m, k), (k, n))
    return of(lambda x, w: (x @ w).sum(d), (b, m, k), (b, k, n))


def join_products(rng: random.Random) -> Instance:
    """Several products that share an operand; the others lie evenly in one tensor, or are put side by side."""
    b, k, n, count = (max(s, 2) for s in sizes(rng, 4))
    kind = rng.randrange(5)
    if kind == 0:
        return of(lambda x, w: [(x[:, t] @ w).exp() for t in range(count)], (b, count, k), (k, n))
    if kind == 1:
        return of(lambda x, w, c: [torch.addmm(c, x[t], w) * 2 for t in reversed(range(count))],
                  (count, b, k), (k, n), (n,))  # fmt: skip
    if kind == 2:
        return of(lambda w, *xs: [(x.exp() @ w).exp() for x in xs], (k, n), *[(b, k)] * count)
    if kind == 3:
        return of(lambda x, w: [(x @ w[:, n * t : n * t + n]).exp() for t in range(count)], (b, k), (k, n * count))
    return of(lambda x, *ws: [(x @ w.mT).exp() for w in ws], (b, k), *[(n, k)] * count)


INSTANCES: Mapping[str, Callable[[random.Random], Instance]] = {
    f.__name__: f for f in (narrow_product, look_up_later, reorder, distribute, sum_first, join_products)
}
