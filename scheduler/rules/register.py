"""``torch_mlc.register_rule``: how a kind of kernel is scheduled, told by a user."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import partial
from typing import Any

from ...ir.registration import LOCK, Registration, RegistrationError, nearest
from . import USER_RULES, UserRule, all_rules
from .registry import Rule

_KINDS = ("cpu", "cuda", "hip")


def register_rule(rule: Rule | None = None, *, before: str | None = None, **parts: Any) -> Any:
    """Put a rule before those that torch-mlc has, or before the one that is named.

    A nest is asked of each rule in order; the first that matches it, and whose primitives do not refuse, schedules it.
    Of several rules that were registered for the same place, the last is asked first. Schedules that were measured
    (``MLC_TUNE``) and those by hand go over all rules.

    ``rule`` is a ``torch_mlc.Rule``. Without one this is a decorator of its ``apply(schedule, target, params)``, and
    takes the other fields by name: ``name``, ``kinds``, ``matches``, ``parameters``, and those that may be left out.
    Raises: RegistrationError for a rule whose name another has, for kinds of target that there are not, and for a place
    before a rule that there is not.
    """
    if rule is None:
        return partial(_decorated, before=before, parts=parts)
    if not isinstance(rule, Rule) or parts:
        given = f"{', '.join(parts)} beside a rule" if isinstance(rule, Rule) else f"a {type(rule).__name__}"
        raise RegistrationError(
            f"register_rule was given {given}; it takes a torch_mlc.Rule, or, as a decorator of apply, the other "
            "fields of one by name"
        )
    unknown = [k for k in rule.kinds if k not in _KINDS]
    if unknown or not rule.kinds:
        raise RegistrationError(
            f"rule {rule.name!r} is for {', '.join(unknown) or 'no kind of target'}; the kinds are {', '.join(_KINDS)}"
        )
    with LOCK:
        names = [r.name for r in all_rules()]
        if rule.name in names:
            raise RegistrationError(f"there is a rule {rule.name!r} already; give yours another name")
        if before is not None and before not in names:
            raise RegistrationError(f"there is no rule {before!r} to stand before{nearest(before, names)}")
        entry = UserRule(rule, before)
        USER_RULES.append(entry)
        return Registration("rule", rule.name, rule, partial(USER_RULES.remove, entry))


def _decorated(apply: Any, before: str | None, parts: dict[str, Any]) -> Registration:
    known = [f.name for f in fields(Rule) if f.name != "apply"]
    wanted = [f.name for f in fields(Rule) if f.name in known and f.default is MISSING]
    missing = [n for n in wanted if n not in parts]
    unknown = [n for n in parts if n not in known]
    if missing or unknown:
        wrong = " and ".join(
            [*([f"is not given {', '.join(missing)}"] if missing else []),
             *([f"has no {', '.join(unknown)}"] if unknown else [])]
        )  # fmt: skip
        raise RegistrationError(f"a rule {wrong}; its fields are {', '.join(known)}")
    found: Registration = register_rule(Rule(apply=apply, **parts), before=before)
    return found
