"""What training does: optimizers that write parameters and their states, and parameters that are written where nobody
asks for a gradient.
"""

from __future__ import annotations

import torch

from .maker import Draft, Maker, NoFit, floats_within

number = floats_within(20)
HELD = (
    "p.mul_(2)", "p.add_(1)", "p.zero_()", "p.clamp_(-1, 1)", "p.fill_(0.5)", "p.neg_()", "p[..., :1].zero_()",
    "p.copy_(p.flip(0))" , "p.sub_(0.5).mul_(2)", "p.t_().mul_(2).t_()", "p.transpose(0, -1)[..., :1].add_(1)",
)  # fmt: skip
# Autograd is told of no such write: of what is read before it, nobody says with which values a backward works.
UNTOLD = "p.data.mul_(2)"
ADAM = "beta1=0.75, beta2=0.5, lr={lr}, weight_decay={decay}, eps=0.5, maximize={maximize}, amsgrad=False"
SGD = "weight_decay={decay}, momentum={momentum}, lr={lr}, dampening=0.0, nesterov={nesterov}, maximize={maximize}"


def asks(m: Maker, name: str) -> bool:
    return m.gradient and any(i.name == name and i.grad for i in m.inputs)


def parameters(m: Maker) -> Draft:
    """A parameter written outside of autograd."""
    t = m.pick(number, lambda i: asks(m, i.name))
    fits = [h for h in HELD if t.ndim == 2 or "t_()" not in h]
    if not any(t.name in step.operands for step in m.steps):
        fits.append(UNTOLD)
    text = m.rng.choice(fits)
    return Draft(f"held(lambda p: {text}, {t.name})", (t.name,), 0, "write", True)


def optimizer(m: Maker) -> Draft:
    """A step of an optimizer: rows of one tensor are a parameter and its state."""
    g = m.pick(number, lambda i: i.dtype.itemsize >= 4 and i.elements > 0)
    p = m.fresh([(3, *s) for s in g.shapes], g.dtype, constant=True).name
    common = {"lr": m.rng.choice((0.25, 0.5)), "decay": m.rng.choice((0, 0.25)), "maximize": m.chance(0.3)}
    each = m.rng.choice(("foreach=True", "foreach=False"))
    grads = f"[{g.name}.detach()]"
    if m.chance(0.6) and g.dtype is torch.float32:  # the number of steps is one
        step = "[torch.tensor(3.0)]"
        rule = ADAM.format(**common)
        text = f"adamw([{p}[0]], {grads}, [{p}[1]], [{p}[2].abs_()], [], {step}, foreach=False, {rule})"
    else:
        momentum = m.rng.choice((0, 0.5))
        rule = SGD.format(**common, momentum=momentum, nesterov=bool(momentum) and m.chance(0.5))
        text = f"sgd([{p}[0]], {grads}, [{p}[1]], {each}, {rule})"
    return Draft(f"held(lambda *_: {text})", (p, g.name), 0, "write")


def several(m: Maker) -> Draft:
    """Lists of tensors that are written in one call."""
    t = m.pick(number, lambda i: i.ndim >= 1 and i.has(0, 2) and not asks(m, i.name))
    n = t.name
    text = m.rng.choice((
        f"torch._foreach_mul_([{n}[0], {n}[1:]], 2)",
        f"torch._foreach_add_([{n}[0], {n}[1]], [{n}[1] * 2, {n}[0] + 0])",
        f"torch._foreach_copy_([{n}[:1], {n}[1:2]], [torch.ones_like({n}[:1]), torch.zeros_like({n}[:1])])",
        f"torch._foreach_zero_([{n}[0], {n}[-1]])", f"torch._foreach_neg_([*{n}[:2]])",
    ))  # fmt: skip
    return Draft(text, (n,), 0, "write", True)


def two_written(m: Maker) -> Draft:
    """An op of the user's that writes two tensors, parts of one memory at times."""
    if m.gradient:
        raise NoFit
    t = m.pick(number, lambda i: i.ndim >= 1 and i.has(0, 2))
    text = m.rng.choice(("moved_({t}[0], {t}[1])", "moved_({t}[:1], {t}[1:])", "moved_({t}, torch.ones(3))"))
    return Draft(text.format(t=t.name), (t.name,), 1, "write", True)


TRAINING = ((2.0, parameters), (2.0, optimizer), (1.0, several), (0.7, two_written))
