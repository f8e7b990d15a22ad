"""Random numbers: dropouts, draws from distributions, and both in functions that the backward calls again.

Programs are compiled so that they draw what eager draws, bit for bit.
"""

from __future__ import annotations

from .maker import Draft, Maker, floats_within

number = floats_within(20)
# By what a tensor of numbers in float32 is filled, or what is made like it. Nothing is rounded here that a kernel may
# round otherwise: in double precision the numbers are the same.
FILLS = (
    "t.uniform_(-1, 2)", "t.normal_(0.5, 2)", "t.exponential_(2)", "t.bernoulli_(0.3)", "t.random_(0, 5)",
    "t.log_normal_(0, 0.3)", "t.geometric_(0.4)", "torch.rand_like(t)", "torch.randn_like(t)",
    "torch.randint_like(t, 0, 7)", "torch.bernoulli(t.fill_(0.25))", "torch.randint_like(t, 5)", "torch.randn(t.shape)",
    "torch.rand(t.shape) - 0.5", "torch.normal(0.5, 2.0, t.shape)", "t.uniform_()", "t.normal_().abs_()",
)  # fmt: skip
DROPS = (
    "F.dropout({a}, 0.3)", "F.dropout({a}, 0.5, True)", "F.dropout({a} * 2, 0.1) + {a}", "F.dropout({a}, 0.0)",
    "F.dropout({a}, 0.4, training=False)", "F.dropout(F.dropout({a}, 0.3), 0.2)",
    "F.dropout({a}[..., :2], 0.3)", "F.dropout({a}.transpose(0, -1), 0.3)",
    "F.dropout(torch.tanh({a}), 0.25, inplace=True)",
    "{a} + F.dropout(F.gelu({a}), 0.2)", "torch.dropout({a}, 0.6, True).sum(-1)", "F.dropout({a}[:1], 0.5) * {a}",
    "recomputed(lambda p: F.dropout(torch.tanh(p), 0.4) * p, {a})", "recomputed(lambda p: rand(p) * p, {a})",
    "recomputed(lambda p: F.dropout(p, 0.5), F.dropout({a}, 0.5))",
)  # fmt: skip
ROWS = (
    "F.dropout(torch.softmax({a}, -1), 0.2)", "torch.softmax(F.dropout({a}, 0.2), -1)",
    "F.layer_norm({a} + F.dropout({a}, 0.1), {a}.shape[-1:], eps=0.1)",
    "F.dropout({a}.mean(-1, keepdim=True), 0.3) * {a}",
    "torch.softmax({a} - drawn(lambda t: t.exponential_(), {a}).log(), -1)", "F.dropout({a}, 0.3).cumsum(-1)",
    "F.dropout({a}, 0.3) @ {a}.transpose(-1, -2)", "F.dropout({a} @ {a}.transpose(-1, -2), 0.3)",
    "F.dropout(torch.softmax({a} @ {a}.transpose(-1, -2) * 0.2, -1), 0.3) @ {a}",
    "F.scaled_dot_product_attention({a}, {a}, {a}, dropout_p=0.3)",
    "recomputed(lambda p: F.dropout(torch.softmax(p @ p.transpose(-1, -2), -1), 0.3) @ p, {a})",
)  # fmt: skip


def dropped(m: Maker) -> Draft:
    a = m.pick(number, lambda i: i.ndim >= 1)
    rows = a.ndim >= 2 and a.has(-1) and a.has(0) and m.chance(0.4)
    options = [*(ROWS if rows else DROPS)]
    if rows and a.ndim in (3, 4, 5):
        options += [f"F.dropout{a.ndim - 2}d({{a}}, 0.5)", "F.alpha_dropout({a}, 0.3)"]
    return m.choose(options, a=a)


def drawn(m: Maker) -> Draft:
    a = m.pick(number)
    draw = f"drawn(lambda t: {m.rng.choice(FILLS)}, {a.name})"
    options = (
        draw,
        f"{draw} * {a.name}",
        f"{a.name} + {draw}",
        f"torch.where({draw} > 0.5, {a.name}, 0.0)",
        f"{draw}.sum()",
        f"drawn(lambda t: t.uniform_(), {a.name}).log() + {a.name}",
    )
    return m.choose(options)


def chosen(m: Maker) -> Draft:
    """Draws whose probabilities are data."""
    a = m.pick(number, lambda i: i.sure and 1 <= i.ndim <= 2 and i.has(-1, 3) and i.has(0))
    weights = f"({a.name}.float().abs() + 0.5)"
    options = (
        f"coins({weights} / 4) * {a.name}",
        f"coins(torch.sigmoid({a.name}.float()).round(decimals=1))",
        f"torch.multinomial({weights}, 2)",
        f"torch.multinomial({weights}, 5, replacement=True)",
        f"torch.randperm({a.name}.shape[0])",
        f"{a.name}[torch.randint(0, {a.name}.shape[0], (4,))]",
        f"torch.poisson({weights})",
    )
    return m.choose(options, exact=True)


def filled(m: Maker) -> Draft:
    """Random numbers written to what is there."""
    t = m.pick(
        lambda i: i.is_float and i.within(-100, 100), lambda i: all(x.name != i.name or not x.grad for x in m.inputs)
    )
    text = m.rng.choice(
        ("{t}.bernoulli_(0.3)", "{t}.random_(0, 4)", "{t}.copy_(drawn(lambda t: t.normal_(), {t}))",
         "{t}[..., :1].bernoulli_(0.5)", "{t}.add_(rand({t}))", "F.dropout({t}, 0.3, inplace=True)")
    ).format(t=t.name)  # fmt: skip
    return Draft(text, (t.name,), 0, "write")


DRAWS = ((3.0, dropped), (2.0, drawn), (0.7, chosen), (0.7, filled))
