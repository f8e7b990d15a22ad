"""Products, convolutions, pooling, attention, losses, and control flow."""

from __future__ import annotations

import torch

from .maker import Draft, Info, Maker, NoFit, floats_within

number = floats_within(60)


def product(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 1)
    n = a.name
    columns = m.rng.choice((1, 3, 4, 8, 17))
    inner = a.extents(-1)
    form = m.rng.random()
    if form < 0.3:
        w = m.fresh([(columns, k) for k in inner], a.dtype)
        if m.chance(0.5):
            b = m.fresh([(columns,)] * len(m.sizes), a.dtype)
            return Draft(f"F.linear({n}, {w.name}, {b.name})", (n, w.name, b.name), exact=True)
        return Draft(m.rng.choice((f"F.linear({n}, {w.name})", f"{n} @ {w.name}.t()")), (n, w.name), exact=True)
    if form < 0.55:

        def fits(i: Info) -> bool:
            return number(i) and i.dtype is a.dtype and i.ndim >= 1 and i.extents(-2 if i.ndim > 1 else 0) == inner

        b = m.pick(fits) if m.chance(0.5) else m.fresh([(k, columns) for k in inner], a.dtype)
        return Draft(m.rng.choice((f"{n} @ {b.name}", f"torch.matmul({n}, {b.name})")), (n, b.name), exact=True)
    if form < 0.75 and a.ndim >= 2:
        b = m.pick(lambda i: number(i) and i.dtype is a.dtype and i.shapes == a.shapes)
        text = m.rng.choice(
            (
                f"{n} @ {b.name}.transpose(-1, -2)",
                f"{n}.transpose(-1, -2) @ {b.name}",
                f"torch.einsum('...ij,...kj->...ik', {n}, {b.name})",
                f"torch.einsum('...ij,...ij->...i', {n}, {b.name})",
                f"({n} * {b.name}).sum(-1)",
                f"torch.cdist({n}, {b.name} + 0.5)",
            )
        )
        return Draft(text, tuple(dict.fromkeys((n, b.name))), exact="cdist" not in text)
    if a.ndim == 2:
        b = m.fresh([(k, columns) for k in inner], a.dtype)
        c = m.fresh([(s[0], columns) if m.chance(0.5) else (1, columns) for s in a.shapes], a.dtype)
        text = m.rng.choice(
            (
                f"torch.addmm({c.name}, {n}, {b.name})",
                f"torch.addmm({c.name}, {n}, {b.name}, beta=0.5, alpha=2)",
                f"F.relu({n} @ {b.name} + {c.name})",
            )
        )
        return Draft(text, (c.name, n, b.name), exact=True)
    if a.ndim == 3:
        b = m.fresh([(s[0], s[2], 4) for s in a.shapes], a.dtype)
        return Draft(
            m.rng.choice((f"torch.bmm({n}, {b.name})", f"torch.einsum('bij,bjk->bki', {n}, {b.name})")),
            (n, b.name),
            exact=True,
        )
    b = m.fresh(a.shapes[:][:], a.dtype)
    return Draft(
        m.rng.choice((f"torch.tensordot({n}, {b.name}, 1)", f"torch.outer({n}.flatten()[:9], {b.name}.flatten()[:7])")),
        (n, b.name),
        exact=True,
    )


def convolution(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim in (3, 4))
    n, spatial = a.name, a.ndim - 2
    if len(set(a.extents(1))) > 1 or not a.has(1) or any(min(a.extents(d)) < 3 for d in range(2, a.ndim)):
        raise NoFit
    channels = a.extents(1)[0]
    if channels > 16:
        raise NoFit
    kernel = m.rng.choice((1, 2, 3))
    groups = channels if m.chance(0.35) else 1
    out = groups * m.rng.choice((1, 2)) if groups > 1 else m.rng.choice((1, 3, 4))
    w = m.fresh([(out, channels // groups, *([kernel] * spatial))] * len(m.sizes), a.dtype)
    stride, padding, dilation = m.rng.choice((1, 1, 2)), m.rng.choice((0, 1, 1)), m.rng.choice((1, 1, 2))
    if m.chance(0.15) and groups == 1:
        w = m.fresh([(channels, out, *([kernel] * spatial))] * len(m.sizes), a.dtype)
        return Draft(f"F.conv_transpose{spatial}d({n}, {w.name}, stride={stride})", (n, w.name))
    bias, operands = "None", (n, w.name)
    if m.chance(0.5):
        b = m.fresh([(out,)] * len(m.sizes), a.dtype)
        bias, operands = b.name, (*operands, b.name)
    how = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
    return Draft(f"F.conv{spatial}d({n}, {w.name}, {bias}, {how})", operands)


def pooling(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim in (3, 4))
    n, s = a.name, a.ndim - 2
    if any(min(a.extents(d)) < 3 for d in range(2, a.ndim)):
        raise NoFit
    options = [
        f"F.avg_pool{s}d({n}, 2)",
        f"F.avg_pool{s}d({n}, 3, stride=1, padding=1)",
        f"F.adaptive_avg_pool{s}d({n}, 1)",
        f"F.adaptive_avg_pool{s}d({n}, 2)",
        f"F.avg_pool{s}d({n}, 2, ceil_mode=True, count_include_pad=False)",
        f"F.interpolate({n}, scale_factor=2)",
        f"F.glu({n}[..., :2], -1)",
    ]
    if a.sure:
        options += [
            f"F.max_pool{s}d({n}, 2)",
            f"F.max_pool{s}d({n}, 3, stride=1, padding=1)",
            f"F.max_pool{s}d({n}, 2, ceil_mode=True)",
        ] * 2
    if s == 2:
        options += [
            f'F.interpolate({n}, size=(5, 7), mode="bilinear", align_corners=False)',
            f"F.unfold({n}, 2)",
            f'F.interpolate({n}, scale_factor=1.5, mode="nearest")',
            f'F.interpolate({n}, size=(4, 6), mode="bicubic", align_corners=True)',
        ]
        if all(x[1] % 4 == 0 and x[1] for x in a.shapes):
            options.append(f"F.pixel_shuffle({n}, 2)")
        if all(x[2] % 2 == 0 and x[3] % 2 == 0 for x in a.shapes):
            options.append(f"F.pixel_unshuffle({n}, 2)")
    return Draft(m.rng.choice(options), (n,))


def attention(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 2 and i.has(i.ndim - 1) and i.has(i.ndim - 2))
    n = a.name
    same = [i for i in map(m.info, m.names) if i.shapes == a.shapes and i.dtype is a.dtype and number(i)]
    k, v = m.rng.choice(same).name, m.rng.choice(same).name
    causal = f"torch.ones({n}.shape[-2], {n}.shape[-2], dtype=torch.bool).tril()"
    text = m.rng.choice(
        (
            f"torch.softmax({n} @ {k}.transpose(-1, -2) * 0.3, -1) @ {v}",
            f"torch.softmax(({n} @ {k}.transpose(-1, -2)).masked_fill(~{causal}, float('-inf')), -1) @ {v}",
            f"torch.softmax(torch.where({causal}, {n} @ {k}.transpose(-1, -2), -1e4), -1) @ {v}",
            f"torch.softmax(torch.tanh({n} @ {k}.transpose(-1, -2)) * 2, -1) @ {v}",
            f"F.scaled_dot_product_attention({n}, {k}, {v})",
            f"F.scaled_dot_product_attention({n}, {k}, {v}, is_causal=True)",
        )
    )
    return Draft(text, tuple(dict.fromkeys((n, k, v))))


def loss(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim == 2 and i.has(0) and i.has(1))
    n = a.name
    form = m.rng.random()
    how = m.rng.choice(("mean", "sum", "none"))
    if form < 0.5:
        places = m.fresh_places([(s[0],) for s in a.shapes], a.extents(1), torch.int64).name
        text = m.rng.choice(
            (
                f'F.cross_entropy({n}, {places}, reduction="{how}")',
                f'F.cross_entropy({n}, {places}, label_smoothing=0.1, reduction="{how}")',
                f'F.nll_loss(F.log_softmax({n}, -1), {places}, reduction="{how}")',
                f"F.cross_entropy({n}, {places}, ignore_index=0)",
            )
        )
        return Draft(text, (n, places))
    b = m.fresh(a.shapes, a.dtype)
    text = m.rng.choice(
        (
            f'F.mse_loss({n}, {b.name}, reduction="{how}")',
            f'F.l1_loss({n}, {b.name}, reduction="{how}")',
            f'F.huber_loss({n}, {b.name}, reduction="{how}")',
            f'F.binary_cross_entropy_with_logits({n}, {b.name}.sigmoid(), reduction="{how}")',
            f"F.cosine_similarity({n}, {b.name}, eps=0.1)",
            f'F.kl_div(F.log_softmax({n}, -1), torch.softmax({b.name}, -1), reduction="{how}")',
            f"F.pairwise_distance({n}, {b.name})",
        )
    )
    return Draft(text, (n, b.name))


BRANCHES = (
    "{p} * 2 + 1",
    "{p}.abs()",
    "torch.tanh({p})",
    "{p} - 0.5",
    "-{p}",
    "{p} * {p}",
    "{p}.clone()",
    "{p} - {p}.mean()",
    "{p} + {p}.shape[0]",
)


def cross_attention(m: Maker) -> Draft:
    """Queries over keys of another length, with biases, masks and grouped heads."""
    a = m.pick(number, lambda i: i.ndim >= 2 and i.has(i.ndim - 1) and i.has(i.ndim - 2))
    n, length = a.name, m.rng.choice((1, 3, 8, 17, 33))
    k = m.fresh([(*s[:-2], length, s[-1]) for s in a.shapes], a.dtype).name
    v = m.fresh([(*s[:-2], length, s[-1]) for s in a.shapes], a.dtype).name if m.chance(0.7) else k
    scores, operands = f"{n} @ {k}.transpose(-1, -2)", (n, k, v)
    form = m.rng.random()
    if form < 0.5:
        mask = m.fresh([(s[-2], length) for s in a.shapes], torch.bool if m.chance(0.5) else a.dtype)
        edit = f"({scores}).masked_fill({mask.name}, -1e4)" if mask.is_bool else f"{scores} + {mask.name}"
        options = [f"torch.softmax({edit}, -1) @ {v}"]
        # A row that is masked out is defined by neither.
        options += [f"F.scaled_dot_product_attention({n}, {k}, {v}, {mask.name})"] if not mask.is_bool else []
        return Draft(m.rng.choice(options), tuple(dict.fromkeys((*operands, mask.name))))
    weights = m.rng.choice(
        (
            f"torch.softmax({scores} / {n}.shape[-1] ** 0.5, -1)",
            f"torch.softmax(({scores}).float() * 0.3, -1).to({n}.dtype)",
            f"torch.softmax(({scores}).clamp(-3, 3), -1) * 2",
            f"torch.exp({scores} - ({scores}).amax(-1, keepdim=True))",
            f"torch.softmax(torch.where(torch.arange({k}.shape[-2]) <= torch.arange({n}.shape[-2])[:, None], "
            f"{scores}, -1e4), -1)",
            f"torch.sigmoid({scores})",
        )
    )
    return Draft(f"{weights} @ {v}", tuple(dict.fromkeys(operands)))


def transformed(m: Maker) -> Draft:
    """Functions of functions, checkpoints, autocast, and operations over lists."""
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0) and i.within(-8, 8))
    n = a.name
    form = m.rng.random()
    body = m.rng.choice(("p * p", "torch.tanh(p) * 2", "p - p.mean()", "torch.softmax(p, -1)", "p.cumsum(-1)"))
    if form < 0.3 and a.ndim > 1:
        return Draft(f"torch.vmap(lambda p: {body})({n})", (n,))
    if form < 0.45 and not m.gradient:
        return Draft(f"torch.func.grad(lambda p: ({body}).sin().sum())({n})", (n,))
    if form < 0.65:
        return Draft(f"recomputed(lambda p: {body}, {n})", (n,))
    if form < 0.85 and a.dtype is torch.float32 and a.ndim >= 2:
        w = m.fresh([(s[-1], 4) for s in a.shapes], a.dtype)
        return Draft(f"in_bfloat16(lambda p, q: p @ q, {n}, {w.name})", (n, w.name))
    b = m.pick(number, lambda i: i.name != n and i.dtype is a.dtype)
    text = m.rng.choice(("torch._foreach_mul([{a}, {b}], 2)", "torch._foreach_add([{a}, {b}], [{b} * 2, {b}])",
                         "torch._foreach_abs([{a}, {b}])", "torch._foreach_mul([{a}, {b}], [{a}, {b}])"))  # fmt: skip
    return Draft(text.format(a=n, b=b.name), (n, b.name), results=2, exact=True)


def branch(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0))
    try:
        decides = m.pick(lambda i: i.is_bool or i.is_integer)
    except NoFit:
        decides = m.fresh([(3,)] * len(m.sizes), torch.int64)
    yes, no = (m.rng.choice(BRANCHES).format(p="p") for _ in range(2))
    above = f"{decides.name}.sum() > {m.rng.choice((0, 2, -1))}"
    text = f"cond({above}, lambda p: {yes}, lambda p: {no}, ({a.name},))"
    if m.chance(0.3):
        b = m.pick(number, lambda i: i.shapes == a.shapes and i.dtype is a.dtype)
        text = f"cond({above}, lambda p, q: ({yes}) * q, lambda p, q: {no} - q, ({a.name}, {b.name}))"
        return Draft(text, tuple(dict.fromkeys((a.name, b.name, decides.name))))
    if m.chance(0.2):
        inner = f"cond(p.shape[0] * {decides.name}.sum() > 3, lambda p: {no}, lambda p: p * 1, (p,))"
        text = f"cond({above}, lambda p: {yes}, lambda p: {inner}, ({a.name},))"
    return Draft(text, tuple(dict.fromkeys((a.name, decides.name))))


def loop(m: Maker) -> Draft:
    if m.gradient:
        raise NoFit
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0))
    body = m.rng.choice(("p * 0.5 + 1", "torch.tanh(p)", "p - p.mean()", "p.flip(0)"))
    condition = m.rng.choice(("i < 3", "(i < 5) & (i >= 0)", "i < 0"))
    start = "torch.zeros((), dtype=torch.int64)"
    if m.chance(0.3):
        text = f"while_loop(lambda i, p, q: {condition}, lambda i, p, q: (i + 1, q * 0.5, {body}), "
        return Draft(f"{text}({start}, {a.name}.clone(), {a.name} * 2))", (a.name,), results=3)
    return Draft(
        f"while_loop(lambda i, p: {condition}, lambda i, p: (i + 1, {body}), ({start}, {a.name}.clone()))",
        (a.name,),
        results=2,
    )


def broken(m: Maker) -> Draft:
    """A break of the graph."""
    return Draft("torch._dynamo.graph_break()", (), results=0)


MODULES = (
    (4.0, product), (1.5, convolution), (1.5, pooling), (2.0, attention), (1.5, loss), (1.0, branch), (0.5, loop),
    (0.3, broken), (1.0, cross_attention), (1.2, transformed),
)  # fmt: skip
