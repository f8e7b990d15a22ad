"""Control flow, of Python and of torch, functions that are transformed, and ops of the user's."""

from __future__ import annotations

import torch

from .maker import Draft, Maker, NoFit, floats_within

number = floats_within(60)


def of_python(m: Maker) -> Draft:
    """Conditions on sizes, loops over rows, lists and dictionaries."""
    a = m.pick(lambda i: i.ndim >= 1 and i.within(-100, 100) and not i.is_bool)
    n, d = a.name, m.rng.randrange(a.ndim)
    options = [
        f"({n} * 2 if {n}.shape[{d}] > {m.rng.choice((3, 5, 8))} else {n} + 1)",
        f"dict(p={n}, q={n} * 2)['q']",
        f"({n}.sum({d}) if {n}.shape[{d}] % 2 else {n}.amax({d}) * 2)" if a.has(d) else f"{n} - len({n}.shape)",
        f"[r + k for k, r in enumerate({n}.chunk(2, {d}))][-1]",
        f"(lambda p, k=2: p * k - 1)({n})",
        f"{n} * {n}.shape[{d}] // 2" if a.is_integer else f"{n} * ({n}.shape[{d}] // 2)",
        f"{n} + float({n}.ndim)",
        f"{n} * min({n}.shape)" if a.elements else f"{n} * 2",
        f"{n}.new_ones(()) * {n}.numel()",
    ]
    if a.has(0) and max(a.extents(0)) <= 9:
        options += [
            f"torch.stack([r * k for k, r in enumerate({n}.unbind(0))])",
            f"sum({n}.unbind(0))",
            f"torch.cat([r.reshape(-1) for r in {n}])",
            f"torch.stack([*{n}][::-1])",
        ]
    return m.choose(options, exact=True)


def by_data(m: Maker) -> Draft:
    """Python that looks at data: breaks of the graph, or sizes that data decide."""
    a = m.pick(lambda i: i.ndim >= 1 and i.within(-100, 100) and not i.is_bool)
    b = m.pick(lambda i: (i.is_integer or i.is_bool) and i.within(-1000, 1000))
    n, count = a.name, f"({b.name}.sum() % 3)"
    options = [
        f"({n} * 2 if {b.name}.sum() > 1 else {n} - 1)",
        f"{n} * int({count})",
        f"{n}[: int({count}) + 1] * 1",
        f"{n}.sum() * {count}.item()",
        f"torch.full((int({count}) + 1,), 2.0) * {n}.sum()",
        f"torch.arange(int({count}) + 2)",
        f"{n}.narrow(0, 0, int({count}) * 0) * 1",
        f"{n} + bool({b.name}.any())",
        f"torch.nonzero({b.name})",
        f"{n}.repeat(int({count}) + 1, *([1] * {a.ndim - 1}))",
    ]
    return m.choose(options, exact=True)


def branches(m: Maker) -> Draft:
    """Branches with several results, closures, and branches in loops."""
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0))
    b = m.pick(lambda i: i.is_bool or i.is_integer, lambda i: i.within(-1000, 1000))
    n, above = a.name, f"{b.name}.sum() > {m.rng.choice((0, 2, -1))}"
    form = m.rng.random()
    if form < 0.35:
        text = f"cond({above}, lambda p: (p * 2, p.sum(0)), lambda p: (torch.tanh(p), p.mean(0)), ({n},))"
        return m.draft(text, results=2)
    if form < 0.6:
        other = m.pick(lambda i: i.shapes == a.shapes and i.dtype is a.dtype)
        return m.draft(f"cond({above}, lambda p: p + {other.name}, lambda p: p * {other.name} * 0.5, ({n},))")
    if form < 0.8:
        w = m.fresh([(k, k) for k in a.extents(-1)], a.dtype)
        return m.draft(f"cond({above}, lambda p, q: torch.softmax(p @ q, -1), lambda p, q: p - 1.0, ({n}, {w.name}))")
    if m.gradient:
        raise NoFit
    inner = "cond(i > 1, lambda r: r * 0.5, lambda r: r.sin(), (p,))"
    start = f"(torch.zeros((), dtype=torch.int64), {n}.clone())"
    return m.draft(f"while_loop(lambda i, p: i < 3, lambda i, p: (i + 1, {inner}), {start})", results=2)


def functional(m: Maker) -> Draft:
    """Batched and differentiated functions, without gradients through them, and ops of the user's."""
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0) and i.within(-8, 8))
    n = a.name
    body = m.rng.choice(("torch.tanh(p) * 2", "p * p", "torch.softmax(p, -1)", "p - p.mean()", "p.cumsum(-1)"))
    options = [
        f"held(lambda p: {body}, {n}) * {n}",
        f"limited({n})",
        f"thrice({n})",
        f"thrice({n} * 2) + {n}",
        f"limited(torch.tanh({n}))",
        f"recomputed(lambda p: thrice({body}), {n})",
        f"recomputed(limited, {n})",
    ]
    if not m.gradient:
        options += [
            f"torch.func.jvp(lambda p: {body}, ({n},), ({n} * 0.5,))[1]",
            f"torch.func.vjp(lambda p: {body}, {n})[1]({n} * 0.5)[0]",
        ]
        if a.ndim == 1 and a.elements <= 16:
            options += [
                f"torch.func.jacrev(lambda p: {body})({n})",
                f"torch.func.hessian(lambda p: ({body}).sum())({n})",
            ]
    if a.ndim >= 3:
        options += [f"torch.vmap(lambda p: p @ p.transpose(-1, -2))({n})", f"torch.vmap(lambda p: p.t(), 0, 1)({n})"]
    return m.choose(options)


def written(m: Maker) -> Draft:
    """An op of the user's that writes, and lines that write and go on with what they have written."""
    t = m.pick(
        lambda i: i.within(-100, 100) and not i.is_bool and i.dtype is not torch.complex64,
        lambda i: not (m.gradient and any(x.name == i.name and x.grad for x in m.inputs)),
    )
    n = t.name
    if m.chance(0.3) and not m.gradient:
        return Draft(f"double_({n})", (n,), 0, "write", True)
    options = [f"{n}.mul_(2)", f"{n}.add_(1).mul_(2)", f"{n}.neg_() * 2", f"{n}.zero_()"]
    if t.ndim and t.has(0):
        options += [
            f"{n}[0].add_(1)",
            f"{n}.transpose(0, -1).mul_(2)",
            f"{n}[..., ::2].neg_()",
            f"{n}[1:].fill_(2).sum()",
        ]
    return Draft(m.rng.choice(options), (n,), 1, "write", True)


CONTROL = ((2.0, of_python), (1.0, by_data), (1.0, branches), (1.5, functional), (1.5, written))
