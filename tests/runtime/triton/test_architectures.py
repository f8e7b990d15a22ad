"""A GPU is asked for by a name that the compilers here know, or the error says which they do."""

from __future__ import annotations

import pytest
import torch

import torch_mlc
from torch_mlc.ir.machine import KNOWN
from torch_mlc.ir.target import TargetError
from torch_mlc.runtime.targets import named_target
from torch_mlc.runtime.triton import architectures

pytest.importorskip("triton")
NEST = """
@nest(outputs=['out0'])
def double(in0: float32[64], out0: float32[64]):
    for k in thread_x(64):
        with block('b0'):
            i0 = spatial(64, k)
            out0[i0] = add(in0[i0], in0[i0])
"""


def test_what_triton_and_its_assembler_know() -> None:
    nvidia, amd = architectures.architectures("cuda"), architectures.architectures("hip")
    assert {"sm_80", "sm_90", "sm_100", "sm_120"} <= set(nvidia)
    assert [int(n[3:]) for n in nvidia] == sorted({int(n[3:]) for n in nvidia})
    assert [f"hip:{n}" for n in amd] == [n for n in KNOWN if n.startswith("hip")]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("cuda:sm_130", "cuda:sm_121"), ("cuda:sm_104", "cuda:sm_103"), ("cuda:sm_91", "cuda:sm_90"),
        ("hip:gfx940", "hip:gfx942"), ("hip:gfx941", "hip:gfx942"), ("hip:gfx999", "hip:gfx950"),
    ],
)  # fmt: skip
def test_an_unknown_one_is_an_error(name: str, near: str) -> None:
    kind, _, arch = name.partition(":")
    says = rf"no code for '{name}' can be made here: .* do not know {arch}; did you mean {near}\? They know {kind}:\w+"
    for asked in (lambda: named_target(name), lambda: torch_mlc.compile(NEST, name)):
        with pytest.raises(TargetError, match=says):
            asked()
    with pytest.raises(TargetError, match=says):
        torch_mlc.explain(torch.sin, torch.randn(8), target=name)


@pytest.mark.parametrize(
    "name", ["hip:gfx908", "hip:gfx906", "hip:gfx1030", "hip:gfx1100", "hip:gfx1200", "cuda:sm_60"]
)
def test_one_that_no_code_is_made_for(name: str) -> None:
    with pytest.raises(TargetError, match=rf"no target '{name}'; the known GPU targets are cuda:sm_70, .*hip:gfx950"):
        named_target(name)


def test_where_nobody_can_tell_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, variable, _ in architectures._ASSEMBLERS:
        monkeypatch.setenv(variable, "/nowhere/ptxas")
    architectures.architectures.cache_clear()
    assert architectures.architectures("cuda") == () and named_target("cuda:sm_130").arch == "sm_130"
    architectures.architectures.cache_clear()
