"""What decides the code of a graph and lies outside it: settings, schedules by hand, targets, and what a process has
made of our own tables and functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType
from uuid import uuid4

import torch

from ...ir.expr.dots import USER_DOTS
from ...ir.expr.intrinsics import INTRINSICS
from ...ir.expr.ops import OPS
from ...runtime.cache.fingerprint import key_of
from ...runtime.cache.foreign_code import UnknownCode, described, foreign_code
from ...runtime.settings.options import Options
from ...runtime.targets import target_for
from ...scheduler import rules
from ...scheduler.numerics import EAGER, FAST, NumericsByPlace, is_fast
from .. import converters
from ..compiling.pass_lists import pass_lists
from ..compiling.register import UserRewrite
from ..compiling.tuning import predicted_schedules
from ..patterns.register import PATTERNS

# What the code of a kernel depends on as well as that of its graph.
_SETTINGS, _FOREIGN = "settings", "code of others in torch-mlc"


def uncacheable() -> str:
    """Why nothing of this process may be cached; "" where it may."""
    return foreign_code().unknown


def _process_fingerprint() -> str:
    """What this process does otherwise than our text says: functions of others in our modules, and the order of tables
    that decide. Of what cannot be told, never the same twice."""
    foreign = foreign_code()
    return f"{_tables(foreign.state)} {foreign.text} {uuid4().hex if foreign.unknown else ''}"


@lru_cache(maxsize=1)
def _tables(state: int) -> str:
    """A digest of which converters there are, and which passes and rules in order; ``state`` is another one where
    they are."""
    known = sorted(converters.CONVERTERS.items(), key=lambda item: item[0])
    return key_of(
        [*(f"{op} {_name(fn)}" for op, fn in known),
         *(f"{level} {p.name} {_name(p.function)}" for level, passes in pass_lists() for p in passes), "rules",
         *(f"{r.name} {r.kinds} {sorted(c.name for c in r.can)}" for r in rules.all_rules()), "intrinsics",
         *(f"{OPS[name]} {i.triton if isinstance(i.triton, str) else ''}" for name, i in INTRINSICS.items()),
         "dots", *map(repr, USER_DOTS.values()),
         "patterns", *(f"{p.name} {p.examples} {_told(p.replacement)}" for p in PATTERNS.values())]
    )  # fmt: skip


def _name(of: object) -> str:
    """Which of our own functions one is, with what its maker gave it: rows of a table are made alike."""
    match of:
        case FunctionType():
            code, cells = of.__code__, of.__closure__ or ()
            given = [_name(x) for x in (*code.co_consts, of.__defaults__, *(c.cell_contents for c in cells))]
            return f"{of.__module__}.{of.__qualname__} {code.co_firstlineno} {code.co_code!r} {code.co_names} {given}"
        case str() | int() | float() | None:
            return repr(of)
        case UserRewrite():
            return _name(of.function)
        case partial():
            return f"partial {_name(of.func)} {[_name(x) for x in of.args]}"
        case tuple():
            return str([_name(x) for x in of])
    return f"{type(of).__qualname__} {getattr(of, 'name', getattr(of, '__qualname__', ''))}"


def _told(of: object) -> str:
    """What a library's function or op is, which is no code of others; what cannot be told is that elsewhere."""
    try:
        return described(of)
    except UnknownCode:
        return ""


def _settings(options: Options) -> str:
    """Strictness and tuning change which code is found, never what a key means; but what predictions choose, or the
    model, is nobody else's."""
    predicted = " predicted" * predicted_schedules(options)
    # Nodes tell what they keep of eager's numerics where it is told by places, and so do kernels.
    options = replace(options, numerics=FAST if is_fast(options.numerics) else EAGER)
    fixed = torch.are_deterministic_algorithms_enabled()
    filled = " filled" * (fixed and torch.utils.deterministic.fill_uninitialized_memory)
    order = f"fixed{filled}" if fixed else "free"
    return (
        f"{replace(options, tune=options.tune == 'model' and 'model', strict=False).fingerprint()} {order}{predicted}"
    )


def surroundings(options: Options, devices: Iterable[str]) -> dict[str, str]:
    """By name, what decides the code of a graph whose tensors are on some devices."""
    return {
        _SETTINGS: _settings(options),
        _FOREIGN: _process_fingerprint(),
        "default type": str(torch.get_default_dtype()),  # in which a whole number is compared with a float
        "host program": options.host_program,
        "numerics by place": str(options.numerics) if isinstance(options.numerics, NumericsByPlace) else "",
        "schedules by hand": str(options.schedules.content if options.schedules is not None else None),
        "targets": " ".join(
            repr(target_for(d, options.target, options.threads, options.cpu_products, options.libraries))
            for d in devices
        ),
    }


def kernel_settings(around: Mapping[str, str]) -> str:
    """What the code of each kernel depends on, of the ``surroundings`` of its graph."""
    return f"{around[_SETTINGS]} {around[_FOREIGN]}"
