"""Blocks of models: norms with weights and running statistics, gated and rotated features, heads, recurrent cells."""

from __future__ import annotations

from .indexing import places_along
from .maker import Draft, Maker, NoFit, floats_within

number = floats_within(60)


def norm(m: Maker) -> Draft:
    """Norms of rows with weights, and what surrounds them."""
    a = m.pick(number, lambda i: i.ndim >= 2 and i.has(-1))
    n, rows = a.name, [(k,) for k in a.extents(-1)]
    w = m.fresh(rows, a.dtype).name
    b = m.fresh(rows, a.dtype).name
    wide = f"{n}.to(torch.float32)"
    options = (
        f"F.layer_norm({n}, {n}.shape[-1:], {w}, {b}, eps=0.1)",
        f"F.rms_norm({n}, {n}.shape[-1:], {w}, eps=0.1)",
        f"{n} * torch.rsqrt({n}.pow(2).mean(-1, keepdim=True) + 0.1) * {w} + {b}",
        f"({wide} * torch.rsqrt({wide}.square().mean(-1, keepdim=True) + 0.1)).to({n}.dtype) * {w}",
        f"{n} + F.layer_norm({n} * {b}, {n}.shape[-1:], {w}, None, eps=0.1)",
        f"F.gelu(F.layer_norm({n}, {n}.shape[-1:], {w}, {b}, eps=0.1)).sum(-1)",
        f"({n} - {n}.mean(-1, keepdim=True)) / ({n}.std(-1, keepdim=True, correction=0) + 0.1) * {w}",
        f"F.rms_norm({n} + {b}, {n}.shape[-1:], {w}, eps=0.1) @ torch.diag({b})",
    )
    return m.choose(options)


def channels(m: Maker) -> Draft:
    """Norms of channels: statistics of the batch or kept ones, which it may write."""
    a = m.pick(number, lambda i: 2 <= i.ndim <= 5 and i.has(0) and i.has(1) and i.elements > 2 * max(i.extents(1)))
    n, sizes = a.name, [(k,) for k in a.extents(1)]
    stats = m.fresh([(2, k) for k in a.extents(1)], a.dtype, constant=True).name
    # Eager's gradient reads behind weights that are expanded.
    w, b = f"{m.fresh(sizes, a.dtype).name}.contiguous()", m.fresh(sizes, a.dtype).name
    form = m.rng.random()
    if form < 0.4:
        text = f"F.batch_norm({n}, {stats}[0], {stats}[1], {w}, {b}, training=True, momentum=0.25, eps=0.1)"
        return Draft(text, (stats, *(o for o in m.draft(text).operands if o != stats)), 1, "write")
    if form < 0.6:
        return m.draft(f"F.relu(F.batch_norm({n}, {stats}[0], {stats}[1].abs() + 0.5, {w}, {b}, eps=0.1))")
    if form < 0.7:
        return m.draft(f"F.batch_norm({n}, None, None, {w}, {b}, training=True, eps=0.1)")
    if a.ndim < 3:
        raise NoFit
    groups = "2" if all(s[1] % 2 == 0 for s in a.shapes) else "1"
    options = (
        f"F.group_norm({n}, {groups}, {w}, {b}, eps=0.1)",
        f"F.silu(F.group_norm({n}, {groups}, {w}, eps=0.1))",
        f"F.instance_norm({n}, weight={w}, bias={b}, eps=0.1)",
        f"F.local_response_norm({n}, 2)",
    )
    return m.choose(options)


def feed(m: Maker) -> Draft:
    """Products between activations."""
    a = m.pick(number, lambda i: i.ndim >= 2 and i.has(-1))
    n, k = a.name, a.extents(-1)
    c = m.rng.choice((3, 8, 16, 17))
    w, v = (m.fresh([(e, c) for e in k], a.dtype).name for _ in range(2))
    options = (
        f"F.silu({n} @ {w}) * ({n} @ {v})",
        f"{n} + F.gelu({n} @ {w}) @ {v}.t()",
        f"({n} @ {w} + 1).relu().sum(-1)",
        f"torch.softmax({n} @ {w} * 0.3, -1) @ {v}.t()",
        f"({n} @ {w}).argmax(-1) * 0 + ({n} @ {v}).sum(-1)",
        f"torch.sigmoid({n} @ {w}) * torch.tanh({n} @ {v})",
        f"F.layer_norm({n} @ {w}, ({c},), eps=0.1)",
        f"torch.logsumexp({n} @ {w}, -1)",
        f"F.log_softmax({n} @ {w} * 0.5, -1)",
        f"{n} @ ({w} * 0.5 + {v})",
        f"(({n} * 0.5) @ {w}).amax(-1)",
        f"F.normalize({n} @ {w}, dim=-1, eps=0.1)",
        f"{n} @ {w} @ {w}.t()",
    )
    return m.choose(options)


def heads(m: Maker) -> Draft:
    """Attention as models write it: heads, rotations, biases of distance, windows, groups."""
    a = m.pick(number, lambda i: i.ndim in (3, 4) and i.has(-1) and i.has(-2) and i.has(0))
    n, scores = a.name, f"{a.name} @ {a.name}.transpose(-1, -2) * 0.2"
    here = f"torch.arange({n}.shape[-2])"
    far = f"({here}[:, None] - {here}).abs()"
    options = [
        f"torch.softmax({scores} - {far} * 0.1, -1) @ {n}",
        f"torch.softmax(torch.tanh(({scores}) / 5) * 5, -1) @ {n}",
        f"torch.softmax(({scores}).masked_fill({far} > 2, float('-inf')), -1) @ {n}",
        f"torch.softmax({n}, -1) @ (torch.softmax({n}, -2).transpose(-1, -2) @ {n})",
        f"torch.softmax({scores}, -2) @ {n}",
        f"torch.softmax({scores}, -1).sum(-2)",
        f"(torch.softmax({n}.sum(-1), -1).unsqueeze(-1) * {n}).sum(-2)",
        f"torch.logsumexp({scores}, -1)",
        f"F.scaled_dot_product_attention({n}, {n}, {n}, scale=0.3, attn_mask=({here}[:, None] >= {here}))",
    ]
    if all(s[-1] % 2 == 0 for s in a.shapes):
        w = m.fresh([(k,) for k in a.extents(-1)], a.dtype).name
        half = f"{n}.shape[-1] // 2"
        turned = f"torch.cat([-{n}[..., {half}:], {n}[..., :{half}]], -1)"
        options += [f"{turned} * {w}.sin() + {n} * {w}.cos()"] * 2
        if a.ndim == 3:
            split = f"{n}.unflatten(-1, (2, -1)).transpose(1, 2)"
            for causal in (True, False):
                attended = f"F.scaled_dot_product_attention({split}, {split}, {split}, is_causal={causal})"
                options.append(f"{attended}.transpose(1, 2).flatten(-2)")
    if a.ndim == 4 and all(s[1] % 2 == 0 and s[1] for s in a.shapes) and len(set(a.extents(1))) == 1:
        k = m.fresh([(s[0], s[1] // 2, 5, s[3]) for s in a.shapes], a.dtype).name
        options += [f"F.scaled_dot_product_attention({n}, {k}, {k}, enable_gqa=True)"] * 3
    return m.choose(options)


def cache(m: Maker) -> Draft:
    """A cache of keys that is written and read."""
    a = m.pick(number, lambda i: i.ndim == 3 and i.has(0) and i.has(1) and i.has(2))
    length = 7
    kept = m.fresh([(s[0], length, s[2]) for s in a.shapes], a.dtype, constant=True)
    places, _ = places_along(m, kept, 1, [(1,)] * len(m.sizes))
    text = f"{a.name} @ {kept.name}.index_copy_(1, {places}, {a.name}[:, :1].detach()).transpose(-1, -2)"
    reads = m.draft(text).operands
    return Draft(text, (kept.name, *(o for o in reads if o != kept.name)), 1, "write")


def cell(m: Maker) -> Draft:
    """Recurrent cells."""
    a = m.pick(number, lambda i: i.ndim == 2 and i.has(0) and i.has(1) and i.dtype.itemsize >= 4)
    n, hidden = a.name, 3
    h = m.fresh([(s[0], hidden) for s in a.shapes], a.dtype).name
    kind, gates = m.rng.choice((("gru", 3), ("lstm", 4), ("rnn_tanh", 1)))
    w = m.fresh([(gates * hidden, k) for k in a.extents(1)], a.dtype).name
    v = m.fresh([(gates * hidden, hidden)] * len(m.sizes), a.dtype).name
    if kind == "lstm":
        return m.draft(f"torch.lstm_cell({n}, ({h}, {h} * 0.5), {w}, {v})", results=2)
    return m.draft(f"torch.{kind}_cell({n}, {h}, {w}, {v})")


def embedded(m: Maker) -> Draft:
    """Rows that are looked up, and what is done with them."""
    a = m.pick(number, lambda i: i.ndim == 2 and i.has(0) and i.has(1))
    n = a.name
    at, _ = places_along(m, a, 0, [(4, 3)] * len(m.sizes))
    options = (
        f"F.embedding({at}, {n}, padding_idx=0)",
        f"F.embedding({at}, {n}) + {n}.mean(0)",
        f"F.embedding({at}, {n}).sum(1)",
        f"F.layer_norm(F.embedding({at}, {n}), {n}.shape[-1:], eps=0.1)",
        f"(F.embedding({at}, {n}) @ {n}.t()).amax(-1)",
        f"F.embedding({at}, {n}, scale_grad_by_freq=False).transpose(0, 1)",
        f"F.one_hot({at}, {n}.shape[0]).to({n}.dtype) @ {n}",
        f"F.embedding({at}, {n})[:, 0] * F.embedding({at}, {n})[:, -1]",
        f"F.cross_entropy(F.embedding({at}, {n}).flatten(0, 1), {at}.flatten() % {n}.shape[1])",
    )
    return m.choose(options)


def windows(m: Maker) -> Draft:
    """Convolutions between norms and borders, pooling with places, sampling."""
    a = m.pick(number, lambda i: i.ndim in (4, 5) and i.dtype.itemsize >= 4 and i.has(1) and i.has(0))
    if any(min(a.extents(d)) < 3 for d in range(2, a.ndim)) or len(set(a.extents(1))) > 1 or a.extents(1)[0] > 12:
        raise NoFit
    n, s, c = a.name, a.ndim - 2, a.extents(1)[0]
    w = m.fresh([(4, c, *([3] * s))] * len(m.sizes), a.dtype).name
    options = [
        f'F.conv{s}d({n}, {w}, padding="same")',
        f"F.relu(F.conv{s}d({n}, {w}, stride=2))",
        f"F.batch_norm(F.conv{s}d({n}, {w}), None, None, training=True, eps=0.1)",
        f"F.lp_pool{s}d({n}.abs() + 0.5, 2.0, 2)",
        f"F.adaptive_avg_pool{s}d({n}, 3)",
        f"F.silu(F.group_norm(F.conv{s}d({n}, {w}, padding=1), 2, eps=0.1))",
        f"F.conv{s}d({n}, {w}).mean({tuple(range(2, a.ndim))})",
        f"F.adaptive_max_pool{s}d({n}, 2)" if a.sure else f"{n} * 2",
        f'F.interpolate({n}, size={(4,) * s}, mode="area")',
        f'F.interpolate({n}, scale_factor=2, mode="nearest-exact")',
    ]
    if a.ndim == 4:
        grid = m.fresh([(s0[0], 3, 4, 2) for s0 in a.shapes], a.dtype).name
        theta = m.fresh([(s0[0], 2, 3) for s0 in a.shapes], a.dtype).name
        mode, pad = m.rng.choice(("bilinear", "bicubic")), m.rng.choice(("zeros", "border", "reflection"))
        options += [
            f'F.grid_sample({n}, {grid} * 0.4 + 0.03, "{mode}", "{pad}", align_corners=False)',
            f"F.affine_grid({theta}, (1, 1, 3, 4), align_corners=False)"
            if a.extents(0) == (1,)
            else f"F.unfold({n}, 3)",
            f"F.conv2d(F.pad({n}, (1, 1, 1, 1), mode='circular'), {w})",
            f"F.conv2d(F.pad({n}, (2, 1, 0, 1)), {w})",
            f"F.fold(F.unfold({n}, 2), {n}.shape[2:], 2)",
            f"F.avg_pool2d({n}, (2, 3), (1, 2), (1, 0), divisor_override=3)",
            f"F.conv_transpose2d({n}, {w}.transpose(0, 1).contiguous(), stride=2, padding=1, output_padding=1)",
        ]
        if a.sure and m.chance(0.3):
            return m.draft(f"F.max_pool2d({n}, 2, return_indices=True)", results=2, exact=True)
    return m.choose(options)


def losses(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0) and i.has(-1))
    n = a.name
    b = m.fresh(a.shapes, a.dtype).name
    how = m.rng.choice(("mean", "sum", "none"))
    options = [
        f'F.poisson_nll_loss({n} * 0.1, {b}.abs(), reduction="{how}")',
        f'F.soft_margin_loss({n}, {b}, reduction="{how}")',
        f'F.gaussian_nll_loss({n}, {b}, {b}.abs().detach() + 0.5, reduction="{how}")',
        f'F.binary_cross_entropy(torch.sigmoid({n}), torch.sigmoid({b}).detach(), reduction="{how}")',
        f'F.huber_loss({n}, {b}, delta=0.7, reduction="{how}")',
        f'F.smooth_l1_loss({n}, {b}, beta=0.6, reduction="{how}")',
        f'F.hinge_embedding_loss({n}, torch.ones_like({n}), reduction="{how}")',
    ]
    if a.ndim == 2:
        c = m.fresh(a.shapes, a.dtype).name
        options += [
            f'F.triplet_margin_loss({n}, {b}, {c} + 0.03, reduction="{how}")',
            f"F.cross_entropy({n}, torch.softmax({b}, -1))",
            f'F.multilabel_soft_margin_loss({n}, ({b} > 0).to({n}.dtype), reduction="{how}")'
            if a.sure
            else f"{n} * {b}",
            f'F.cosine_embedding_loss({n}, {b}, torch.ones({n}.shape[0]), reduction="{how}")',
        ]
    return m.choose(options)


BLOCKS = (
    (2.0, norm),
    (1.5, channels),
    (2.0, feed),
    (2.5, heads),
    (0.7, cache),
    (0.7, cell),
    (1.0, embedded),
    (1.5, windows),
    (1.0, losses),
)
