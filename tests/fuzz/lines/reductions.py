"""Reductions, scans, orders and normalisations."""

from __future__ import annotations

from .maker import Draft, Info, Maker, NoFit

CONTINUOUS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "logsumexp",
    "var",
    "std",
    "norm",
    "prod",
    "nansum",
    "nanmean",
    "sum",
    "mean",
    "amax",
)
SUDDEN = ("any", "all", "argmax", "argmin", "count_nonzero")
EXACT = ("sum", "amax", "amin", "prod", "nansum")


def reduction(m: Maker) -> Draft:
    a = m.pick(lambda i: i.within(-100, 100) or m.special or not i.is_float)
    names = [*CONTINUOUS, *(SUDDEN if a.sure else ())]
    op = m.rng.choice(names)
    keep = m.rng.choice(("", "", ", keepdim=True"))
    if op in ("argmax", "argmin"):
        dims = str(m.dim(a, least=1)) if a.ndim and m.chance(0.8) else ""
    else:
        dims = _dims(m, a)
    if op == "count_nonzero" or not dims:
        keep = ""
    exact = op in EXACT or op in SUDDEN
    if op == "norm":
        p = m.rng.choice(("2", "1", '"fro"', "float('inf')", "3"))
        return Draft(
            f"torch.linalg.vector_norm({a.name}, 2{', ' + dims if dims else ''}{keep})"
            if m.chance(0.5)
            else f"torch.norm({a.name}, {p}{', ' + dims if dims else ''}{keep})",
            (a.name,),
        )
    if op == "logsumexp" and not dims:
        raise NoFit
    if op == "prod" and (not dims or "," in dims):
        raise NoFit
    if op in ("var", "std") and m.chance(0.4):
        keep += ", correction=0"
    function = f"torch.{op}({a.name}{', ' if dims or keep else ''}{dims}{keep if dims else keep.removeprefix(', ')})"
    if op in ("sum", "mean") and m.chance(0.15):
        kind = m.rng.choice(("torch.float32", "torch.float64"))
        function = f"{function[:-1]}, dtype={kind})"
    return Draft(function, (a.name,), exact=exact)


def _dims(m: Maker, a: Info) -> str:
    if not a.ndim or m.chance(0.15):
        return ""
    if a.ndim > 1 and m.chance(0.35):
        some = m.rng.sample(range(a.ndim), m.rng.randint(1, a.ndim))
        return f"({''.join(f'{d}, ' for d in some)})"
    return str(m.dim(a))


def row_wise(m: Maker) -> Draft:
    """Softmax and norms: as many elements come out as go in."""
    a = m.pick(lambda i: i.is_float and i.ndim >= 1, lambda i: i.within(-60, 60) or m.special)
    d, n = m.dim(a, least=1), a.name
    shape = f"{n}.shape[-1:]"
    options = [
        f"torch.softmax({n}, {d})",
        f"F.log_softmax({n}, {d})",
        f"torch.softmax({n}, {d}, dtype=torch.float32)",
        f"F.softmin({n}, {d})",
        f"F.layer_norm({n}, {shape})",
        f"F.rms_norm({n}, {shape})",
        f"F.normalize({n}, dim={d}, eps=0.1)",
        f"{n} - {n}.mean({d}, keepdim=True)",
        f"{n} / ({n}.abs().amax({d}, keepdim=True) + 1)",
        f"torch.cumsum({n}.tanh(), {d})",
        f"({n} - {n}.amax({d}, keepdim=True)).exp()",
        f"torch.logcumsumexp({n}, {d})",
        f"F.layer_norm({n}, {shape}, eps=0.1).mean({d})",
        f"torch.softmax({n}, {d}).cumsum({d})",
    ]
    if a.ndim > 2:
        options += [
            f"F.layer_norm({n}, {n}.shape[-2:])",
            f"F.instance_norm({n}, eps=0.1)",
            f"F.batch_norm({n}, None, None, training=True, eps=0.1)",
        ]
        if all(s[1] % 2 == 0 and s[1] for s in a.shapes):
            options += [f"F.group_norm({n}, 2, eps=0.1)"] * 2
    return Draft(m.rng.choice(options), (n,))


def scan(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1 and (i.within(-50, 50) or m.special or i.is_integer))
    d, n = m.dim(a), a.name
    options = [f"torch.cumsum({n}, {d})"] * 3 + [f"torch.flip(torch.cumsum({n}, {d}), ({d},))"]
    if a.has(d) and a.sure:
        options += [f"torch.cummax({n}, {d})[0]", f"torch.cummin({n}, {d}).values"]
    options += [
        f"torch.cumsum({n}, {d}) - {n}",
        f"torch.cumsum({n}.flip({d}), {d}).flip({d})",
        f"torch.cumsum({n}, {d}, dtype=torch.float64)",
        f"F.pad(torch.cumsum({n}, -1)[..., :-1], (1, 0))",
        f"torch.cumsum({n}, {d}).select({d}, -1)",
        f"torch.cumsum(torch.cumsum({n}, {d}), {d - 1 if a.ndim > 1 and d else d})",
        f"torch.cumsum({n}, {d}) / torch.arange(1, {n}.shape[{d}] + 1).sum()",
    ]
    if a.sure:
        options += [f"torch.cumsum({n} > 0, {d})", f"torch.cumsum({n} != 0, {d}) * ({n} > 0)"]
    if a.is_integer or max(a.extents(d)) <= 6:
        options += [f"torch.cumprod({n}, {d})"] * 2
    return Draft(m.rng.choice(options), (n,), exact=True)


def higher_scan(m: Maker) -> Draft:
    """Scans by a function of the program's."""
    a = m.pick(lambda i: i.ndim >= 1 and i.is_float and i.within(-3, 3))
    d, n = m.dim(a, least=1) % a.ndim, a.name
    if m.chance(0.6) and not m.gradient:
        combine = m.rng.choice(("p + q", "torch.maximum(p, q)", "torch.logaddexp(p, q)", "torch.minimum(p, q) * 1"))
        return Draft(f"associative_scan(lambda p, q: {combine}, {n}, {d})", (n,))
    step = m.rng.choice(("(h * 0.5 + p, h - p)", "(torch.tanh(h + p), h * p)", "(torch.maximum(h, p), p - h)"))
    if max(a.extents(0)) > 17 or not a.has(0):
        raise NoFit
    return Draft(f"scan(lambda h, p: {step}, {n}[0] * 0.5, {n})", (n,), results=2)


def statistics(m: Maker) -> Draft:
    """Reductions of integers and booleans, of several operands, or of what is computed for them alone."""
    a = m.pick(lambda i: i.ndim >= 1 and (not i.is_float or i.sure) and i.within(-1000, 1000))
    d, n = m.dim(a, least=1), a.name
    options = [
        f"({n} > 0).sum({d})", f"({n} > 0).float().mean({d})", f"({n} == {n}.amax({d}, keepdim=True)).sum({d})",
        f"({n} != 0).any({d})", f"({n} > -1).all({d})", f"torch.where({n} > 0, {n}, 0).sum({d})",
        f"({n} * {n}).sum({d})", f"{n}.sum({d}, dtype=torch.int32)" if not a.is_float else f"{n}.abs().amax({d})",
        f"{n}.argmax({d}, keepdim=True)", f"{n}.flatten().argmin()", f"({n} - 1).abs().amax({d}) + {n}.amin({d})",
        f"torch.count_nonzero({n} > 1, {d})", f"{n}.sum() * ({n} >= 0)", f"torch.aminmax({n})[0] + {n}",
    ]  # fmt: skip
    if not a.is_float:
        options += [f"{n}.double().mean({d})", f"torch.cumsum({n}, {d}) & 3", f"{n}.long().prod({d})"]
    return Draft(m.rng.choice(options), (n,), exact=True)


def pair(m: Maker) -> Draft:
    """Two results of one visit."""
    a = m.pick(lambda i: i.ndim >= 1 and not i.is_bool and i.within(-100, 100))
    d, n = m.dim(a, least=1), a.name
    options = [(f"torch.aminmax({n}, dim={d})", True)]
    if a.is_float:
        options += [(f"torch.var_mean({n}, {d})", False), (f"torch.std_mean({n}, {d}, correction=0)", False)]
    if a.sure:
        options += [
            (f"torch.max({n}, {d})", True),
            (f"torch.min({n}, {d})", True),
            (f"torch.sort({n}, {d}, stable=True)", True),
            (f"torch.cummax({n}, {d})", True),
            (f"torch.sort({n}, {d}, descending=True, stable=True)", True),
        ]
    text, exact = m.rng.choice(options)
    return Draft(text, (n,), results=2, exact=exact)


def order(m: Maker) -> Draft:
    """What sorts. Positions among equal elements are eager's only where the sort is stable."""
    a = m.pick(lambda i: i.ndim >= 1 and i.sure and not i.is_bool and (i.finite or not i.is_float))
    d, n = m.dim(a, least=2), a.name
    options = (
        f"torch.topk({n}, 2, {d})[0]",
        f"torch.argsort({n}, {d}, stable=True)",
        f"torch.sort({n}, {d})[0]",
        f"torch.kthvalue({n}, 2, {d})[0]",
        f"torch.median({n}, {d})[0]",
        f"torch.median({n})",
        f"torch.searchsorted(torch.sort({n}, -1)[0], {n})",
        f"torch.bucketize({n}, torch.arange(-2.0, 3.0))",
        f"torch.topk({n}, 1, {d}, largest=False)[0]",
        f"torch.sort({n}.flatten())[0]",
        f"torch.histc({n}.float(), 4, -2, 2)",
    )
    return Draft(m.rng.choice(options), (n,), exact=True)


REDUCTIONS = (
    (5.0, reduction),
    (3.0, row_wise),
    (1.5, scan),
    (1.2, pair),
    (0.7, order),
    (0.3, higher_scan),
    (1.5, statistics),
)
