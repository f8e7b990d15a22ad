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


def gather_apart(m: Maker) -> Draft:
    """Positions in several dimensions, beside slices, broadcast, or of which each comes once."""
    a = m.pick(lambda i: i.ndim >= 2 and i.has(0) and i.has(1))
    n = a.name
    if m.chance(0.25):
        d = m.rng.randrange(a.ndim)
        at = m.fresh_order(a.extents(d)).name
        text = m.rng.choice((f"{n}[{':, ' * d}{at}]", f"torch.index_select({n}, {d}, {at})", f"torch.argsort({at})"))
        return Draft(text, (n, at) if n in text else (at,), exact=True)
    p, read = places_along(m, a, 0, [(3,)] * len(m.sizes))
    q, other = places_along(m, a, 1, [(2,)] * len(m.sizes))
    options = [f"{n}[{p}[:, None], {q}]", f"{n}[{p}][:, {q}]", f"{n}[{p}, 1:]", f"{n}[None, {p}]", f"{n}[{p}, :1]"]
    options += [f"{n}[:, {q}]", f"{n}[{p}, {q}[0]]", f"{n}[{p}, None]", f"{n}[{p}[:2], {q}].sum(0)"]
    if a.ndim > 2 and a.has(a.ndim - 1):
        last, third = places_along(m, a, a.ndim - 1, [(3,)] * len(m.sizes))
        options = [f"{n}[{p}, ..., {last}]", f"{n}[..., {last}]", f"{n}[{p}, :, {last}]", f"{n}[{p}, 1:, {last}]"]
        q, other = last, third
    text = m.rng.choice(options)
    reads = [r or w for w, r in ((p, read), (q, other)) if w in text]
    return Draft(text, tuple(dict.fromkeys((n, *reads))), exact=True)


def bags(m: Maker) -> Draft:
    a = m.pick(lambda i: i.is_float and i.ndim == 2 and i.has(0) and i.has(1))
    places, read = places_along(m, a, 0, [(3, 2)] * len(m.sizes))
    how = m.rng.choice(("sum", "mean", "max") if a.sure else ("sum", "mean"))
    return Draft(f'F.embedding_bag({places}, {a.name}, mode="{how}")', (a.name, read or places))


def scatter_apart(m: Maker) -> Draft:
    """Positions in several dimensions, parts of views, and orders, in which each position comes once."""
    a = m.pick(lambda i: i.ndim >= 1 and not i.is_bool and i.has(0))
    n = a.name
    form = m.rng.random()
    if form < 0.3 and a.ndim >= 2 and a.has(1):
        source = m.fresh([(4, *s[2:]) for s in a.shapes], a.dtype).name
        p, read = places_along(m, a, 0, [(4,)] * len(m.sizes))
        q, other = places_along(m, a, 1, [(4,)] * len(m.sizes))
        reads = (read or p, other or q)
        return Draft(f"torch.index_put({n}, ({p}, {q}), {source}, accumulate=True)", (n, source, *reads), exact=True)
    if form < 0.55:
        d = m.rng.randrange(a.ndim)
        at = m.fresh_order(a.extents(d)).name
        source = partner(m, a, dtype=a.dtype)
        if source.shapes != a.shapes:
            raise NoFit
        options = [f"torch.index_copy({n}, {d}, {at}, {source.name})"]
        if d == 0:
            spread = f"{at}.reshape(-1{', 1' * (a.ndim - 1)}).expand({n}.shape)"
            options += [f"torch.index_put({n}, ({at},), {source.name})"]
            options += [f"torch.scatter({n}, 0, {spread}, {source.name})"]
        return Draft(m.rng.choice(options), (n, at, source.name), exact=True)
    if form < 0.75:
        mask = partner(m, a, dtype=torch.bool)
        source = m.fresh(a.shapes, a.dtype)
        if mask.shapes != a.shapes:
            raise NoFit
        return Draft(f"{n}.masked_scatter({mask.name}, {source.name})", (n, mask.name, source.name), exact=True)
    options = [f"torch.slice_scatter({n}, {n}[::2] * 2, 0, step=2)", f"torch.slice_scatter({n}, {n}[1:] - 1, 0, 1)"]
    if a.ndim >= 2 and a.has(1):
        options += [
            f"torch.diagonal_scatter({n}, {n}.diagonal() * 2)",
            f"torch.select_scatter({n}, {n}.select(1, 0) + 1, 1, -1)",
            f"torch.slice_scatter({n}, {n}[:, :1], 1, 0, 1)",
        ]
    return Draft(m.rng.choice(options), (n,), exact=True)


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
                f'torch.index_reduce({n}, {d}, {places}, {source.name}, "prod")',
                f'torch.index_reduce({n}, {d}, {places}, {source.name}, "mean", include_self=False)',
            )
        else:
            places, read = places_along(m, a, d, shapes)
            ops = (
                f"torch.scatter_add({n}, {d}, {places}, {source.name})",
                *(
                    f'torch.scatter_reduce({n}, {d}, {places}, {source.name}, "{how}")'
                    for how in ("sum", "amax", "amin", "mean", "prod")
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
                    f"torch.unique({n})",
                    f"{n}.flatten()[torch.nonzero({n}.flatten() > 0).squeeze(1)]",
                    f"{n}[({n} > 0).any(-1)]" if a.ndim == 2 else f"{n}[{n} > 1]",
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


def repeated(m: Maker) -> Draft:
    """As many copies of each row as data say."""
    a = m.pick(lambda i: i.ndim >= 1)
    d = m.dim(a, least=1) % a.ndim
    counts = m.fresh_places([(s[d],) for s in a.shapes], (4,) * len(m.sizes), torch.int64).name
    return Draft(f"{a.name}.repeat_interleave({counts}, {d})", (a.name, counts), exact=True)


INDEXING = (
    (5.0, gather), (3.0, gather_apart), (0.5, bags), (4.0, scatter), (3.0, scatter_apart), (0.7, masked),
    (0.5, one_hot), (0.3, repeated),
)  # fmt: skip
