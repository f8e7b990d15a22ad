"""``torch_mlc.register_pass``: a step of the compilation, told by a user."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import fx

from ...ir.passes import Pass
from ...ir.registration import LOCK, Registration, RegistrationError, nearest
from .pass_lists import USER_PASSES, PassLists, UserPass, pass_lists

# Not what comes between a host program and one of its two printed forms, which are to be the same program, nor from a
# few layers to all, which not every graph has.
_LEVELS = tuple(f.name for f in fields(PassLists) if f.name not in ("layers", "text", "code"))


@dataclass(frozen=True, slots=True)
class UserRewrite:
    """A rewrite of a user's, of which it is asked whether it gives what a pass of its level must give."""

    function: Callable[..., Any]
    with_context: bool

    def __call__(self, subject: Any, context: Any) -> Any:
        made = self.function(subject, context) if self.with_context else self.function(subject)
        in_place = isinstance(subject, fx.GraphModule)
        if not isinstance(made, int if in_place else type(subject)):
            wanted = "how often it rewrote something, 0 for not at all" if in_place else f"a {type(subject).__name__}"
            raise TypeError(f"it gives a {type(made).__name__}; it must give {wanted}")
        return made


def register_pass(
    rewrite: Callable[..., Any] | None = None,
    *,
    level: str = "graph",
    before: str | None = None,
    after: str | None = None,
    name: str = "",
) -> Any:
    """Add a step to one of the lists that a compilation runs, at its end, or before or after the pass that is named.

    ``level`` says what is rewritten. Of ATen graphs (``torch.fx.GraphModule``, in place): "joint", of forward and
    backward, before they are parted; "forward" and "backward", after that; "inference", of a graph without a backward;
    "part", each of those but the first, and "frozen", after it; "aten", each graph that is compiled, bodies of control
    flow among them. Of ``torch_mlc.ir``: "graph" (``Graph``) before fusion, "function" (``TensorFunction``) before each
    is lowered, and the other levels of ``PassLists``.

    ``rewrite(subject)`` or ``rewrite(subject, context)`` gives the subject rewritten, the same object where nothing
    changed; in place, how often it rewrote something. ``context`` is what our passes of that level get. Without a
    rewrite this is a decorator of it; ``name`` is that of the function, unless it is given.

    The step is verified under MLC_VERIFY, dumped under MLC_DUMP_DIR, timed and recorded like ours. An error in it, or
    a result that breaks a rule, is a PassError that names it.
    Raises: RegistrationError for a level or a place that there is not, and for a name that a pass of the level has.
    """
    if rewrite is None:
        return partial(register_pass, level=level, before=before, after=after, name=name)
    called = name or getattr(rewrite, "__name__", "")
    if not called.isidentifier():
        raise RegistrationError(f"a pass needs a name, such as name='my_pass'; {called!r} is none")
    if level not in _LEVELS:
        raise RegistrationError(
            f"there is no level {level!r} of passes (there are {', '.join(_LEVELS)}){nearest(level, _LEVELS)}"
        )
    if before is not None and after is not None:
        raise RegistrationError(f"pass {called} is to stand before {before} and after {after}; one place is enough")
    function = UserRewrite(rewrite, _takes_context(called, rewrite))
    with LOCK:
        passes = getattr(pass_lists(), level)
        names = list(dict.fromkeys(p.name for p in passes))
        if called in names:
            raise RegistrationError(f"there is a pass {called!r} of level {level!r} already; give yours another name")
        beside = before or after
        if beside is not None and beside not in names:
            raise RegistrationError(
                f"there is no pass {beside!r} of level {level!r} (there are {', '.join(names)}){nearest(beside, names)}"
            )
        entry = UserPass(level, Pass(called, passes[0].level, function), before, after)
        USER_PASSES.append(entry)
        return Registration("pass", called, rewrite, partial(USER_PASSES.remove, entry))


def _takes_context(name: str, rewrite: Callable[..., Any]) -> bool:
    try:
        given = inspect.signature(rewrite).parameters.values()
    except (TypeError, ValueError):
        raise RegistrationError(f"pass {name} is no Python function whose arguments can be counted") from None
    needed = [p for p in given if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) not in (1, 2):
        raise RegistrationError(
            f"pass {name} takes {len(needed)} arguments; it is given a subject, or that and a context"
        )
    return len(needed) == 2
