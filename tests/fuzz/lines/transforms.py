"""Functions of functions: batched and differentiated ones, once and twice; attention that calls a function for each
score; layers that repeat, maps, regions of another precision, blocks that are computed again or compiled once.
"""

from __future__ import annotations

import torch

from .maker import Draft, Maker, NoFit, floats_within

number = floats_within(8)
BF16 = float(torch.finfo(torch.bfloat16).eps)
# Of one tensor of any shape, and of one with its like.
BODIES = (
    "torch.tanh(p) * 2", "p * p", "torch.softmax(p, -1)", "p - p.mean()", "p.cumsum(-1)", "F.gelu(p) * p",
    "p.sin().exp()",
    "p.flip(0) * p", "F.layer_norm(p, p.shape[-1:], eps=0.1)", "p.square().sum(-1)", "torch.logsumexp(p, -1)",
    "p[..., :1] * p",
    "torch.where(p > 0, p, p * 0.5)", "p.roll(1, 0) * p.sin()", "torch.cat([p, p * p], -1)", "p.clamp(-1, 1) * p",
    "F.softplus(p).prod(-1)", "p.std(-1)", "torch.stack([p, p.sin()]).sum(0)", "p.clone().mul_(2).sin()",
    "F.pad(p, (1, 1)) * 0.5", "p.unsqueeze(0).expand(3, *p.shape).sin()", "p.amax(-1)", "torch.diff(p)",
)  # fmt: skip
PAIRS = (
    "p * q.sin()", "torch.where(p > q, p, q)", "(p * q).sum(-1)", "p - q.mean()", "torch.atan2(p, q.abs() + 1)",
    "torch.stack([p, q]).sum(0)", "torch.softmax(p + q, -1) * q", "torch.lerp(p, q, 0.3)", "p.clone().add_(q)",
    "F.mse_loss(p, q)", "torch.cat([p, q], -1).tanh()", "torch.maximum(p, q * 2)",
)  # fmt: skip
SCORES = (
    "s", "s * 0.5", "s + (i - j) * 0.1", "torch.tanh(s / 5) * 5", "torch.where(i >= j, s, -float('inf'))",
    "s - h * 0.5",
    "torch.where((i - j).abs() < 3, s, -float('inf'))", "s + b", "torch.where(i >= j, s * 2, s - 1)",
)  # fmt: skip
LAYERS = (
    "torch.tanh(p @ q) + p", "F.layer_norm(p + F.gelu(p @ q), p.shape[-1:], eps=0.1)", "p + torch.sin(p * q.sum(0))",
    "torch.softmax(p @ p.mT * 0.2, -1) @ p @ q * 0.1 + p", "(p @ q).sin().cumsum(-1) * 0.1",
    "p + F.dropout(p @ q * 0.1, 0.2)",
    "p + recomputed(lambda u: torch.tanh(u @ q), p)", "p.roll(1, -1) * 0.5 + q[0]",
    "torch.tanh(p @ q if k % 2 else p * q[0])",
    "torch.sigmoid(p @ q) * (k + 1)", "F.rms_norm(p, p.shape[-1:], q[0], eps=0.1) + p.mean(-1, keepdim=True)",
    "torch.softmax(p @ q * 0.3, -1) + (p if k == 1 else 1.0)", "F.normalize(p @ q + q[:1], dim=-1, eps=0.1)",
    "p - F.silu(p @ q) * torch.tanh(p @ q.t())", "F.scaled_dot_product_attention(p, p, p) @ q * 0.1",
    "p.flip(-1) * 0.5 + q[k % 2]",
    "torch.where(p > 0, p * 0.5, torch.tanh(p @ q))", "torch.cat([p[..., 1:], torch.tanh(p @ q)[..., :1]], -1)",
)  # fmt: skip
MASKS = ("i >= j", "(i - j).abs() <= 2", "(i >= j) & (i - j < 4)", "(i // 2) == (j // 2)", "j <= i + h", "j >= 0")


def batched(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 2 and all(i.has(d) for d in range(i.ndim)))
    n, d = a.name, m.rng.randrange(a.ndim)
    body, pair = m.rng.choice(BODIES), m.rng.choice(PAIRS)
    out = m.rng.choice((0, 0, 0, -1))
    options = [
        f"torch.vmap(lambda p: {body}, {d}, {out})({n})",
        f"torch.vmap(lambda p, q: {pair}, ({d}, {d}), {out})({n}, {n} * 0.5 + 1)",
        f"torch.vmap(lambda p, q: {pair}, ({d}, None))({n}, {n}.select({d}, 0))",
        f"torch.vmap(lambda p, q: {pair}, (None, {d}))({n}.select({d}, -1), {n})",
        f"torch.vmap(torch.func.grad(lambda p: ({body}).sum()), {d})({n})",
        f"torch.vmap(torch.func.grad(lambda p, q: ({pair}).sum()), ({d}, None))({n}, {n}.select({d}, 0))",
    ]
    if a.ndim >= 3:
        options += [
            f"torch.vmap(torch.vmap(lambda p: {body}), {d}, {out})({n})",
            f"torch.vmap(lambda p: p @ p.mT, {d})({n})",
            f"torch.vmap(lambda p: F.linear(p, p), {d}, -1)({n})",
        ]
    at = m.fresh_places([(s[d],) for s in a.shapes], [1 if d == 0 else s[0] for s in a.shapes], torch.int64).name
    if d != 0:
        options += [f"torch.vmap(lambda p, k: p[k], ({d}, 0))({n}, {at})",
                    f"torch.vmap(lambda p, k: p.index_select(0, k.view(1)), ({d}, 0))({n}, {at})"]  # fmt: skip
    return m.choose(options)


def differentiated(m: Maker) -> Draft:
    """Derivatives of first and second order, which may be differentiated again by who calls."""
    a = m.pick(number, lambda i: i.ndim >= 1 and all(i.has(d) for d in range(i.ndim)))
    n, body = a.name, m.rng.choice(BODIES)
    f = f"lambda p: ({body}).sum()"
    options = [
        f"torch.func.grad({f})({n})",
        f"torch.func.grad(lambda p: torch.func.grad({f})(p).square().sum())({n})",
        f"torch.func.vjp(torch.func.grad({f}), {n})[1]({n})[0]",
        f"torch.func.grad_and_value({f})({n})[0]",
        f"torch.func.vjp(lambda p: p * p, {n})[1]({n}.sin())[0]",
    ]
    if m.dynamic is False:  # torch makes no dual numbers of symbolic sizes
        options += [
            f"torch.func.jvp(lambda p: {body}, ({n},), ({n} * 0.5,))[1]",
            f"torch.func.jvp(torch.func.grad({f}), ({n},), (torch.ones_like({n}),))[1]",
            f"torch.func.linearize(lambda p: {body}, {n})[1]({n})",
        ]
        if a.ndim == 1 and a.elements <= 12:
            options += [
                f"torch.func.{m.rng.choice(('jacrev', 'jacfwd'))}(lambda p: {body})({n})",
                f"torch.func.hessian({f})({n})",
                f"torch.func.jacfwd(torch.func.jacrev({f}))({n})",
            ] * 2
    if m.chance(0.2):
        return m.draft(f"torch.func.grad_and_value({f})({n})", results=2)
    return m.choose(options)


def scored(m: Maker) -> Draft:
    """Attention of which each score passes through a function, and a mask that is one of positions."""
    if m.gradient:
        raise NoFit
    a = m.pick(number, lambda i: i.ndim >= 2 and i.has(-1) and i.has(-2) and i.has(0))
    q = {2: f"{a.name}[None, None]", 3: f"{a.name}[None]", 4: a.name}.get(a.ndim)
    if q is None:
        raise NoFit
    length = m.rng.choice((1, 5, 16, 33))
    heads = [s[1] if a.ndim == 4 else s[0] if a.ndim == 3 else 1 for s in a.shapes]
    batch = [s[0] if a.ndim == 4 else 1 for s in a.shapes]
    same = m.chance(0.5)
    k = (
        q
        if same
        else m.fresh([(b, h, length, s[-1]) for b, h, s in zip(batch, heads, a.shapes, strict=True)], a.dtype).name
    )
    given = f", lambda s, b, h, i, j: {m.rng.choice(SCORES)}" if m.chance(0.75) else ", None"
    if m.chance(0.4):
        given += f", lambda b, h, i, j: {m.rng.choice(MASKS)}"
    return m.draft(f"flex({q}, {k}, {k}{given})")


def layers(m: Maker) -> Draft:
    """Layers that repeat, some of which differ, and what stands between two of them."""
    a = m.pick(number, lambda i: i.ndim >= 2 and i.has(-1, 2) and i.has(-2) and max(i.extents(-1)) <= 40)
    count = m.rng.choice((2, 3, 5, 8))
    w = m.fresh([(count, s[-1], s[-1]) for s in a.shapes], a.dtype).name
    body = m.rng.choice([b for b in LAYERS if "where" not in b or a.sure])
    return m.draft(f"layered(lambda p, q, k: {body}, {a.name}, {w})", results=2)


def mapped(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0) and max(i.extents(0)) <= 17)
    n = a.name
    bodies = ["p * 2 + 1", "torch.tanh(p)", "p * p", "(p - p.mean()).exp()", "p.sum()"]
    if a.ndim > 1:
        bodies += ["torch.softmax(p, -1)", "p.cumsum(-1)", "p.flip(0) * 2"]
    return m.draft(f"mapped(lambda p: {m.rng.choice(bodies)}, {n})")


def precise(m: Maker) -> Draft:
    """Regions under autocast: some ops in bfloat16, some in float32, some as they come."""
    a = m.pick(number, lambda i: i.dtype is torch.float32 and i.ndim >= 2 and i.has(-1) and i.has(-2))
    w = m.fresh([(s[-1], s[-1]) for s in a.shapes], a.dtype).name
    body = m.rng.choice((
        "F.linear(p, q)", "torch.softmax(p @ q, -1)", "F.layer_norm(p @ q, p.shape[-1:], eps=0.1)", "p @ q + p",
        "F.gelu(p @ q) @ q.t()", "(p @ q).sum(-1)", "F.log_softmax(p @ q, -1)", "torch.softmax(p @ p.mT * 0.2, -1) @ p",
        "F.scaled_dot_product_attention(p, p, p)", "(p @ q).exp().float() * 0.1", "torch.cat([p, p @ q], -1)",
        "F.mse_loss(p @ q, p)", "p.mul(2) @ q", "(p @ q).pow(2)", "F.linear(F.linear(p, q), q) * p",
        "(p @ q).cumsum(-1)",
        "recomputed(lambda u: torch.tanh(u @ q), p)",
    ))  # fmt: skip
    return m.draft(f"in_bfloat16(lambda p, q: {body}, {a.name}, {w})", eps=BF16)


def again(m: Maker) -> Draft:
    """Blocks that the backward computes again, regions that are compiled once, user's ops of several results."""
    a = m.pick(number, lambda i: i.ndim >= 1 and i.has(0) and i.has(-1))
    n, body, pair = a.name, m.rng.choice(BODIES), m.rng.choice(PAIRS)
    options = [
        f"recomputed(lambda p, q: {pair}, {n}, {n} * 2)",
        f"recomputed(lambda p: recomputed(lambda q: q.sin(), {body}), {n})",
        f"recomputed(lambda p: ({body}) * {n}.sum(), {n})",
        f"once(lambda p: {body})({n})",
        f"once(lambda p, q: {pair})({n}, {n} + 1)",
        f"once(lambda p: p.sin() + 1)(once(lambda p: p.sin() + 1)({n}))",
        f"kept({n}, 2)[1] * 2",
        f"sum(kept({n} * 2, 1))",
        f"kept(torch.tanh({n}), {n}.shape[0])[0].sum(-1)",
        f"torch.vmap(thrice)({n})" if m.chance(0.2) else f"thrice({n})[..., :1] * {n}",
    ]
    if m.chance(0.25):
        return m.draft(f"kept({n}, 3)", results=2)
    return m.choose(options)


TRANSFORMS = (
    (2.0, layers),
    (2.5, batched),
    (2.5, differentiated),
    (1.5, scored),
    (0.7, mapped),
    (1.5, precise),
    (2.0, again),
)
