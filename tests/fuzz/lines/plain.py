"""Arguments that are plain numbers, which vary from call to call: integers of either sign, floats, truth values."""

from __future__ import annotations

from .maker import Draft, Info, Maker, floats_within

INTS = ("A - 6", "B - A", "-C", "(A * 7 + B) % 11 - 5", "A % 3", "2 - B % 5", "-3", "2", "A")
FLOATS = ("A * 0.375 - 2.0", "B / 4 - 1.5", "0.5", "-1.25", "C * 0.5", "1.0 - A % 3")
FLAGS = ("A % 2 == 0", "B > 4", "A > B", "True", "False")

WITH_INT = (
    "{a} * {n}", "{a} + {n}", "{n} - {a}", "{a} * abs({n})", "{a} + {n} // 4", "{a} + {n} % 5",
    "{a} + -7 // ({n} or 2)",
    "{a} * max({n}, 0)", "{a} * min({n}, 1)", "{a}.clamp(min({n}, 2), abs({n}) + 3)",
    "torch.where({a} > {n}, {a}, {n})", "{a} * ({n} if {n} > 1 else -2)",
    "{a} + torch.arange({n}, {n} + 3)[1]", "{a} + torch.full((), {n})",
    "{a}.new_full((abs({n}) % 4 + 1,), {n})", "{a}.new_zeros(abs({n}) + 1) + {n}", "{a} * torch.tensor({n})",
    "{a} * int({n} > 0)", "{a} + bool({n})", "{a}.add({a}, alpha={n})", "{a} == {n}", "{a}.masked_fill({a} > 0, {n})",
    "torch.ones({n} if {n} > 0 else 3) * {n}", "{a} + float({n})", "{a} * {n} * {n}", "{a} + ({n} >> 1)",
    "torch.arange(abs({n}), -3, -2) * {n}", "{a} + sum(range(abs({n}) % 4))", "{a} - divmod({n}, 3)[1]",
    "({a} > {n}) & ({n} > 0)", "{a}.eq({n}).sum() + {n}", "{a} + round({n} / 2)", "torch.eye(abs({n}) % 5 + 1) * {n}",
)  # fmt: skip
ALONG_INT = (
    "torch.roll({a}, {n}, -1)", "{a}[..., {n}:]", "{a}[..., :{n}]", "{a}[{n}:] + 1", "{a}[-abs({n}):] * 2",
    "{a}[abs({n}) % 2::abs({n}) % 3 + 1]", "F.pad({a}, (abs({n}) % 3, {n} % 2))", "{a}.narrow(0, 0, min(abs({n}), 1))",
    "torch.cat([{a}] * (abs({n}) % 3 + 1), 0)", "{a}.unsqueeze(0).expand(abs({n}) % 3 + 1, *{a}.shape)",
    "{a}.repeat_interleave(abs({n}) % 3, 0)", "torch.diag_embed({a}, {n} % 3)", "{a}.select(0, {n} % {a}.shape[0])",
    "{a}.flatten()[{n} % 2:]", "{a}.movedim({n} % {a}.ndim, 0)", "{a}.sum({n} % {a}.ndim)",
    "{a}.index_select(0, torch.arange({a}.shape[0]) % (abs({n}) + 1) % {a}.shape[0])", "{a}[{n} % {a}.shape[0]]",
    "{a}.unflatten(0, (-1, 1)) * {n}", "{a}.tensor_split(abs({n}) % 3 + 1, 0)[0]", "{a}.diff(n=abs({n}) % 3, dim=0)",
    "torch.tril({a}.unsqueeze(0) * torch.ones(3, 1, 1)[:{a}.ndim > 0].flatten()[0], {n})",
    "{a}.split(abs({n}) % 3 + 1, 0)[-1]", "{a}.chunk(abs({n}) % 3 + 1, 0)[0]",
)  # fmt: skip
WITH_FLOAT = (
    "{a} * {n}", "{a} + {n}", "{n} - {a}", "{a}.clamp(max={n})", "{a}.clamp_min({n})", "F.leaky_relu({a}, {n})",
    "torch.lerp({a}, {a} * 2, {n})", "{a} * int({n})", "{a} * abs({n})", "{a} + max({n}, 0.25)", "{a} + {n} // 1",
    "{a}.add({a}, alpha={n})", "torch.where({a} > {n}, {a}, {n})", "{a} * ({n} if {n} > 0 else 0.125)",
    "torch.full((3,), {n}) + 1", "F.threshold({a}, {n}, {n} + 1)", "torch.addcmul({a}, {a}, {a}, value={n})",
    "F.elu({a}, abs({n}))", "{a} * round({n})", "torch.linspace({n}, 2.0, 5)", "torch.tensor({n}) * {a}",
    "F.hardshrink({a}, abs({n}))", "{a}.masked_fill({a} > {n}, {n})", "{a}.new_full((2,), {n})", "{a} / ({n} or 2.0)",
)  # fmt: skip
WITH_FLAG = (
    "{a} * {n}", "{a} * (2 if {n} else 3)", "{a}.sum(0, keepdim={n})", "{a}.sort(-1, descending={n})[0]",
    "torch.where(torch.tensor({n}), {a}, -{a})", "{a} + (not {n})", "{a}.amax(0, keepdim={n})",
    "{a}.new_full((2,), {n})", "{a} & {n} if not {a}.is_floating_point() and not {a}.is_complex() else {a} - {n}",
)  # fmt: skip


def ints(m: Maker) -> Draft:
    a = _value(m)
    return m.choose(WITH_INT, exact=True, a=a, n=m.plain_number(INTS))


def along(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1 and i.has(0) and i.elements <= 400)
    return m.choose(ALONG_INT, exact=True, a=a, n=m.plain_number(INTS))


def floats(m: Maker) -> Draft:
    return m.choose(WITH_FLOAT, a=m.pick(floats_within(50)), n=m.plain_number(FLOATS))


def flags(m: Maker) -> Draft:
    a = m.pick(lambda i: i.ndim >= 1 and i.has(0) and i.has(-1) and i.sure)
    return m.choose(WITH_FLAG, exact=True, a=a, n=m.plain_number(FLAGS))


def _value(m: Maker) -> Info:
    return m.pick(lambda i: i.sure and i.dtype.is_signed and i.within(-50, 50))


PLAIN = ((2.0, ints), (2.0, along), (1.2, floats), (0.8, flags))
