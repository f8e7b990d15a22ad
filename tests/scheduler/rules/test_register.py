"""Rules of users: where they stand, what they give way to, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import torch_mlc
from torch_mlc.ir.nest.loops import LoopNest
from torch_mlc.ir.target import Target
from torch_mlc.ir.text.parser import parse
from torch_mlc.scheduler.error import ScheduleError
from torch_mlc.scheduler.rules import RULES, all_rules, default_schedule
from torch_mlc.scheduler.rules.cpu.plain import CPU_PLAIN

MINE = replace(CPU_PLAIN, name="mine")
CPU = Target("cpu", "znver3", 8)


def names() -> list[str]:
    return [r.name for r in all_rules()]


def test_where_rules_stand() -> None:
    first, ours = MINE, [r.name for r in RULES]
    with torch_mlc.register_rule(first) as handle:
        assert names() == ["mine", *ours]
        with torch_mlc.register_rule(replace(MINE, name="second")):
            assert names() == ["second", "mine", *ours]
        with torch_mlc.register_rule(replace(MINE, name="second"), before=ours[3]):
            assert names() == ["mine", *ours[:3], "second", *ours[3:]]
        with torch_mlc.register_rule(replace(MINE, name="second"), before="mine"):
            handle.remove()
            assert names() == ["second", *ours], "the rule that it stood before is gone"
    assert names() == ours and all_rules() == RULES


def test_a_rule_that_refuses_gives_way(nest: LoopNest) -> None:
    def refuse(*_: Any) -> None:
        raise ScheduleError("mine", "for a test")

    default = default_schedule(nest, CPU)
    with torch_mlc.register_rule(MINE):
        assert default_schedule(nest, CPU).rule == "mine"
    with torch_mlc.register_rule(replace(MINE, apply=refuse)):
        assert default_schedule(nest, CPU).rule == default.rule
    with torch_mlc.register_rule(replace(MINE, kinds=("cuda",))):
        assert default_schedule(nest, CPU).rule == default.rule


@pytest.fixture
def nest() -> LoopNest:
    found = parse(SCRIPT)
    assert isinstance(found, LoopNest)
    return found


SCRIPT = """
@nest(outputs=["out0"])
def f(in0: float32[12], out0: float32[12]):
    for b0_i0 in serial(12):
        with block("b0"):
            i0 = spatial(12, b0_i0)
            out0[i0] = exp(in0[i0])
"""


def test_what_is_refused() -> None:
    def refused(text: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(torch_mlc.RegistrationError, match=text):
            found = torch_mlc.register_rule(*args, **kwargs)
            found(MINE.apply)
        assert all_rules() == RULES

    refused("there is a rule 'cpu_plain' already", CPU_PLAIN)
    refused("no rule 'cpu_plan' to stand before; did you mean cpu_plain", MINE, before="cpu_plan")
    refused("is for gpu; the kinds are cpu, cuda, hip", replace(MINE, kinds=("gpu",)))
    refused("is for no kind of target", replace(MINE, kinds=()))
    refused("was given a str; it takes a torch_mlc.Rule", "mine")
    refused("was given name beside a rule", MINE, name="mine")
    refused("is not given matches, parameters", name="mine", kinds=("cpu",))
    refused(
        "has no match; its fields are name, kinds, matches, parameters, lighter, can",
        name="m",
        kinds=("cpu",),
        matches=1,
        parameters=1,
        match=1,
    )
