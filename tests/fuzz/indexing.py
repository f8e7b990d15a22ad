"""Gathers, scatters and masks. Scattered positions come twice only where their order does not matter."""

from __future__ import annotations

import torch

from .elementwise import partner
from .maker import Draft, Info, Maker, NoFit

COUNTS = ((3,), (5,), (1,), (7,), (0,))


def places_along(m: Maker, a: Info, dim: int, shapes: list[tuple[int, ...]]) -> tuple[str, str | None]:
    """Text for positions along a dimension, of these shapes, and the value that it reads, if it is not an input's."""
    found = [
        i
        for i in map(m.info, m.names)
        if i.is_integer and i.dtype is not torch.uint8 and list(i.shapes) == shapes and i.low > -(2**31)
    ]
    if found and m.chance(0.6):
        i = m.rng.choice(found)
        n = f"{a.name}.shape[{dim}]"
        return f"({i.name}.long() % {n})", i.name
    return m.fresh_places(shapes, a.extents(dim), torch.int64).name, None


def gather(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1)
    d = m.dim(a, least=1) % a.ndim
    n = a.name
    here = ":, " * d
    form = m.rng.random()
    if form < 0.35:
        (count,) = m.rng.choice(COUNTS)
        places, read = places_along(m, a, d, [(count,)] * len(m.sizes))
        text = m.rng.choice((f"torch.index_select({n}, {d}, {places})", f"{n}[{here}{places}]"))
    elif form < 0.5:
        shapes = [(3, 2)] * len(m.sizes)
        places, read = places_along(m, a, d, shapes)
        text = f"{n}[{here}{places}]"
        if d == 0 and a.ndim == 2 and m.chance(0.5):
            text = f"F.embedding({places}, {n})"
    elif form < 0.8:
        count = m.rng.choice((1, 2, 3))
        shapes = [(*s[:d], s[d] if m.dynamic is not False or m.chance(0.5) else count, *s[d + 1 :]) for s in a.shapes]
        places, read = places_along(m, a, d, shapes)
        text = m.rng.choice((f"torch.gather({n}, {d}, {places})", f"torch.take_along_dim({n}, {places}, {d})"))
    elif form < 0.9 and a.ndim > 1 and a.has(1) and a.has(0):
        shapes = [(4,)] * len(m.sizes)
        p, read = places_along(m, a, 0, shapes)
        q, other = places_along(m, a, 1, shapes)
        reads = [r for r in (read, other) if r]
        made = [i.name for i in m.inputs if i.name in (p, q)]
        return Draft(f"{n}[{p}, {q}]", tuple(dict.fromkeys((n, *reads, *made))), exact=True)
    else:
        places, read = places_along(m, a, d, [(4,)] * len(m.sizes))
        text = f"torch.take({n}, {places})"
    return Draft(text, tuple(dict.fromkeys((n, read or places))), exact=True)


def scatter(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1 and not i.is_bool)
    d = m.dim(a, least=1) % a.ndim
    n = a.name
    form = m.rng.random()
    exact = True
    if form < 0.4:
        count = m.rng.choice((2, 3, 5))
        shapes = [(*s[:d], count, *s[d + 1 :]) for s in a.shapes]
        source = m.fresh(shapes, a.dtype)
        if m.chance(0.6):
            places, read = places_along(m, a, d, [(count,)] * len(m.sizes))
            ops = (
                f"torch.index_add({n}, {d}, {places}, {source.name})",
                f"{n}.index_add({d}, {places}, {source.name}, alpha=2)",
                f'torch.index_reduce({n}, {d}, {places}, {source.name}, "amax")',
            )
        else:
            places, read = places_along(m, a, d, shapes)
            ops = (
                f"torch.scatter_add({n}, {d}, {places}, {source.name})",
                *(
                    f'torch.scatter_reduce({n}, {d}, {places}, {source.name}, "{how}")'
                    for how in ("sum", "amax", "amin", "mean")
                ),
                f'torch.scatter_reduce({n}, {d}, {places}, {source.name}, "amax", include_self=False)',
            )
        text = m.rng.choice(ops)
        exact = "mean" not in text
        return Draft(text, tuple(dict.fromkeys((n, source.name, read or places))), exact=exact)
    if form < 0.6:
        places, read = places_along(m, a, d, [(3,)] * len(m.sizes))
        text = f"{n}.index_fill({d}, {places}, 2)"
        if d == 0 and m.chance(0.5):
            text = f"torch.index_put({n}, ({places},), torch.ones((), dtype={a.dtype}))"
    elif form < 0.75:
        shapes = [(*s[:d], 2, *s[d + 1 :]) for s in a.shapes]
        places, read = places_along(m, a, d, shapes)
        text = f"torch.scatter({n}, {d}, {places}, 3)"
    elif form < 0.9:
        shapes = [(4, *s[1:]) for s in a.shapes]
        if not a.has(0):
            raise NoFit
        source = m.fresh(shapes, a.dtype)
        places, read = places_along(m, a, 0, [(4,)] * len(m.sizes))
        text = f"torch.index_put({n}, ({places},), {source.name}, accumulate=True)"
        return Draft(text, tuple(dict.fromkeys((n, source.name, read or places))), exact=True)
    else:
        # Each position once.
        text = f"torch.index_copy({n}, {d}, torch.arange({n}.shape[{d}]).flip(0), {n} * 2)"
        text = m.rng.choice(
            (
                text,
                f"torch.select_scatter({n}, {n}.select({d}, 0) * 2, {d}, -1)",
                f"torch.slice_scatter({n}, {n}.narrow({d}, 0, 1) + 1, {d}, 0, 1)",
            )
        )
        return Draft(text, (n,), exact=True)
    return Draft(text, tuple(dict.fromkeys((n, read or places))), exact=exact)


def masked(m: Maker) -> Draft:
    """Sizes that depend on data."""
    a = m.pick(lambda i: i.ndim >= 1 and i.sure)
    n = a.name
    form = m.rng.random()
    if form < 0.4 and not a.is_bool:
        return Draft(
            m.rng.choice(
                (
                    f"{n}[{n} > 0]",
                    f"torch.masked_select({n}, {n} > 0)",
                    f"torch.nonzero({n})",
                    f"torch.argwhere({n} > 0)",
                )
            ),
            (n,),
            exact=True,
        )
    if form < 0.6 and not a.is_bool:
        return Draft(m.rng.choice((f"{n} * {n}.sum().item()", f"{n} + ({n} > 0).sum().item()")), (n,), exact=True)
    mask = partner(m, a, dtype=torch.bool)
    if mask.shapes != a.shapes:
        raise NoFit
    return Draft(
        m.rng.choice((f"{n}[{mask.name}]", f"torch.masked_select({n}, {mask.name})")), (n, mask.name), exact=True
    )


def one_hot(m: Maker) -> Draft:
    a = m.pick(lambda i: i.is_integer and i.within(-(2**31), 2**31) and i.elements < 300)
    n = a.name
    options = (f"F.one_hot({n}.long() % 5, 5)", f"torch.bincount(({n}.long() % 6).flatten(), minlength=6)")
    return Draft(m.rng.choice(options), (n,), exact=True)


INDEXING = ((5.0, gather), (4.0, scatter), (0.7, masked), (0.5, one_hot))
