"""Views, copies that move elements, and joins. Sizes are written as those of tensors, so that they may be symbols."""

from __future__ import annotations

import torch

from .maker import Draft, Info, Maker, NoFit


def permute(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 2)
    n = a.ndim
    form = m.rng.random()
    if form < 0.3 and n == 2:
        return Draft(f"{a.name}.t()", (a.name,), kind="view")
    if form < 0.6:
        return Draft(f"{a.name}.transpose({m.dim(a)}, {m.dim(a)})", (a.name,), kind="view")
    if form < 0.7:
        return Draft(f"torch.movedim({a.name}, {m.dim(a)}, {m.dim(a)})", (a.name,), kind="view")
    order = list(range(n))
    m.rng.shuffle(order)
    return Draft(f"{a.name}.permute({', '.join(map(str, order))})", (a.name,), kind="view")


def reshape(m: Maker) -> Draft:
    a = m.pick(lambda i: True)
    name, n = a.name, a.ndim
    options = [
        f"{name}.reshape(-1)",
        f"{name}.flatten()",
        f"{name}.unsqueeze({m.rng.randint(-n - 1, n)})",
        f"{name}.squeeze()",
    ]
    if n:
        options += [
            f"{name}.reshape({name}.shape[0], -1)",
            f"{name}.reshape(-1, {name}.shape[-1])",
            f"{name}.unsqueeze(0)",
        ]
        options += [f"{name}.squeeze({m.dim(a)})"]
    if n > 1:
        turned = ", ".join(f"{name}.shape[{d}]" for d in reversed(range(n)))
        options += [f"{name}.reshape({turned})", f"{name}.flatten(0, 1)", f"{name}.flatten(-2)", f"{name}.ravel()"]
        options += [f"{name}.reshape({name}.shape[0] * {name}.shape[1], *{name}.shape[2:])", f"{name}.view(-1)"]
    for d in range(n):
        for k in (2, 3, 4):
            if all(e and e % k == 0 for e in a.extents(d)):
                options += [f"{name}.unflatten({d}, (-1, {k}))", f"{name}.unflatten({d}, ({k}, -1))"]
    others = [i for i in map(m.info, m.names) if i.name != name and _same_count(i, a) and i.shapes != a.shapes]
    options += [f"{name}.reshape({i.name}.shape)" for i in others]
    text = m.rng.choice(options)
    return Draft(text, (name, *(i.name for i in others if f"({i.name}." in text)), kind="view")


def _same_count(a: Info, b: Info) -> bool:
    return all(_count(x) == _count(y) for x, y in zip(a.shapes, b.shapes, strict=True))


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for e in shape:
        n *= e
    return n


def slices(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1)
    d = m.rng.randrange(a.ndim)
    n, name = f"{a.name}.shape[{d}]", a.name
    least = min(a.extents(d))
    options = ["1:", ":-1", "::2", "1::2", f"{n} // 2:", f":{n} // 2", ":2", "-2:", "1:-1", "::3", ":", "2:100"]
    if least:
        options += ["0", "-1", str(m.rng.randrange(least)), "None, 0"]
    text = f"{name}[{':, ' * d}{m.rng.choice(options)}]"
    form = m.rng.random()
    if form < 0.15 and least > 1:
        text = m.rng.choice((f"{name}.narrow({d}, 1, {n} - 1)", f"{name}.select({d}, 1)", f"{name}.unbind({d})[-1]"))
    elif form < 0.22:
        text = f"{name}[..., None]"
    elif form < 0.28 and a.ndim > 1:
        text = m.rng.choice((f"{name}[1:, 1:]", f"{name}[..., :1]", f"{name}[::2, 1:]", f"{name}[:, :, None]"))
    return Draft(text, (name,), kind="view")


def spread(m: Maker) -> Draft:
    a = m.pick(lambda i: True)
    name = a.name
    options = [f"{name}.expand(2, *{name}.shape)", f"{name}.expand(3, *([-1] * {a.ndim}))"]
    ones = [d for d in range(a.ndim) if set(a.extents(d)) == {1}]
    if ones:
        d = m.rng.choice(ones)
        sizes = ["-1"] * a.ndim
        sizes[d] = m.rng.choice(("3", "5", "1"))
        options += [f"{name}.expand({', '.join(sizes)})"] * 3
    others = [i for i in map(m.info, m.names) if i.name != name and _expands(a, i)]
    text = m.rng.choice(options)
    operands: tuple[str, ...] = (name,)
    if others and m.chance(0.6):
        other = m.rng.choice(others).name
        text = m.rng.choice(
            (
                f"{name}.expand({other}.shape)",
                f"{name}.expand_as({other})",
                f"torch.broadcast_to({name}, {other}.shape)",
            )
        )
        operands = (name, other)
    return Draft(text, operands, kind="view")


def _expands(a: Info, b: Info) -> bool:
    if a.shapes == b.shapes or a.ndim > b.ndim:
        return False
    return all(
        all(p in (1, q) for p, q in zip(reversed(x), reversed(y))) for x, y in zip(a.shapes, b.shapes, strict=True)
    )


def odd_view(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1)
    d, name = m.dim(a), a.name
    options = [
        f"{name}.detach()",
        f"{name}[:]",
        f"{name}.contiguous()",
        f"{name}.chunk(2, {d})[0]",
        f"{name}.tensor_split(2, {d})[-1]",
        f"{name}.unbind({d})[0]",
        f"{name}.unsqueeze({d}).expand(*{name}.shape[:{d % a.ndim}], 2, *{name}.shape[{d % a.ndim}:])",
    ]
    if a.dtype.is_floating_point:
        options.append(f"torch._neg_view({name})")
    if a.dtype in (torch.float32, torch.float64):
        options.append(f"torch.complex({name}, {name}).conj().imag")
    if a.ndim > 1:
        options += [
            f"{name}.diagonal(0, 0, 1)",
            f"{name}.diagonal(1)",
            f"{name}.swapaxes(0, -1)",
            f"{name}.mT.unsqueeze(1)",
            f"{name}.transpose(0, -1).reshape(-1)",
            f"{name}.transpose(0, 1).flatten(0, 1)",
            f"{name}.flatten(0, 1)[1::2]",
            f"{name}.diagonal(-1, 0, 1)[..., 1:]",
            f"torch.atleast_2d({name})",
        ]
    if a.has(d, 3):
        options += [f"{name}.unfold({d}, 3, 1)", f"{name}.unfold({d}, 2, 2)", f"{name}.split(2, {d})[1]"]
    if m.dynamic is False and a.elements > 4:
        options += [f"{name}.as_strided((2, 2), (1, 1))", f"{name}.as_strided((3,), (1,), 0)"]
    if a.ndim == 4:
        options += [f"{name}.contiguous(memory_format=torch.channels_last)"]
    return Draft(m.rng.choice(options), (name,), kind="view")


def parts(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1)
    d, name = m.dim(a, least=2), a.name
    extents = a.extents(d)
    options = [f"{name}.chunk(2, {d})", f"torch.tensor_split({name}, 2, {d})"]
    if len(set(extents)) == 1 and extents[0] > 2:
        options += [f"{name}.split([1, {extents[0] - 1}], {d})", f"torch.split({name}, ({extents[0] - 2}, 2), {d})"]
    return Draft(m.rng.choice(options), (name,), results=2, kind="view")


def moved(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1)
    d, name = m.dim(a), a.name
    shift = m.rng.choice((1, -1, 2, 5))
    options = [
        f"{name}.flip({d})",
        f"torch.roll({name}, {shift}, {d})",
        f"{name}.repeat(2, *([1] * {a.ndim - 1}))",
        f"torch.tile({name}, (2,))",
        f"{name}.repeat_interleave(2, {d})",
        f"torch.roll({name}, {shift})",
        f"torch.stack([{name}, {name}], {d})",
        f"torch.cat([{name}, {name}], {d})",
        f"torch.diff({name}, dim={d})",
        f"F.pad({name}, (1, 2))",
        f"F.pad({name}, (0, 1), value=2.0)",
        f"F.pad({name}, (-1, 1))",
        f"torch.flip({name}, (0, -1))",
        f"torch.cat([{name}.flip({d}), {name}[:1]], 0)",
        f"torch.roll({name}, ({shift}, 1), (0, -1))",
        f"torch.stack([{name}, {name} * 2], -1).flatten(-2)",
        f"torch.column_stack([{name}, {name}])",
        f"torch.cat([{name}.reshape(-1), {name}.reshape(-1)[:3]])",
    ]
    if a.ndim > 1:
        k = m.rng.choice((-1, 0, 1))
        options += [
            f"torch.tril({name}, {k})",
            f"torch.triu({name}, {k})",
            f"torch.rot90({name})",
            f"F.pad({name}, (0, 1, 2, 0))",
        ]
    if a.ndim in (2, 3) and a.has(a.ndim - 1, 3):
        options += [f'F.pad({name}, (1, 2), mode="{mode}")' for mode in ("reflect", "replicate", "circular")]
    if a.ndim == 1:
        options += [
            f"torch.diag({name})",
            f"torch.outer({name}, {name})",
            f"torch.vander({name}, 3)",
            f"torch.diag_embed({name})",
        ]
    return Draft(m.rng.choice(options), (name,), exact=True)


def join(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1)
    d = m.rng.randrange(a.ndim)
    fits = [i for i in map(m.info, m.names) if i.ndim == a.ndim and _same_but(i, a, d)]
    many = [a, *(m.rng.choice(fits) for _ in range(m.rng.choice((1, 1, 2))))]
    m.rng.shuffle(many)
    names = [i.name for i in many]
    text = f"torch.cat([{', '.join(names)}], {d})"
    if all(i.shapes == a.shapes for i in many) and m.chance(0.4):
        text = f"torch.stack([{', '.join(names)}], {m.rng.randint(-a.ndim - 1, a.ndim)})"
    elif m.chance(0.15):
        text = f"torch.hstack([{', '.join(names)}])"
    return Draft(text, tuple(dict.fromkeys(names)), exact=True)


def _same_but(a: Info, b: Info, dim: int) -> bool:
    return all(
        all(p == q for d, (p, q) in enumerate(zip(x, y, strict=True)) if d != dim)
        for x, y in zip(a.shapes, b.shapes, strict=True)
    )


def made(m: Maker) -> Draft:
    """A tensor made of nothing but sizes."""
    a = m.pick(lambda i: i.ndim >= 1)
    n, name = f"{a.name}.shape[{m.dim(a)}]", a.name
    options = (
        f"torch.arange({n})",
        f"torch.arange({n}, dtype=torch.float32)",
        f"torch.arange(0, 2 * {n}, 2)",
        f"torch.eye({n})",
        f"torch.zeros({n}, 3)",
        f"torch.ones({n}, dtype=torch.int64)",
        f"torch.full(({n}, 2), 0.5)",
        f"{name}.new_zeros({n})",
        f"torch.linspace(0, 4, 5) + {n}",
        f"{name}.new_ones({name}.shape)",
        f"torch.tensor(2.0) * {n}",
        f"torch.tril_indices(3, 3) + {n}",
        f"torch.arange({n}, 0, -1)",
        f"torch.meshgrid(torch.arange({n}), torch.arange(3), indexing='ij')[1]",
    )
    text = m.rng.choice(options)
    if not text:
        raise NoFit
    return Draft(text, (name,), exact=True)


VIEWS = (
    (3.0, permute), (3.0, reshape), (3.0, slices), (1.5, spread), (1.2, odd_view), (0.8, parts), (3.0, moved),
    (2.5, join), (0.7, made),
)  # fmt: skip
