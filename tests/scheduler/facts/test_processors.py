"""What schedules of CPUs owe to the processor's maker."""

from __future__ import annotations

import pytest
import torch

import torch_mlc
from torch_mlc.ir.nest.loops import Loop, LoopKind, walk_nodes
from torch_mlc.ir.target import Target, gpu_target
from torch_mlc.scheduler.rules import default_schedule

AMD = Target("cpu", "znver4", 2, vector_bytes=64)
INTEL = Target("cpu", "sapphirerapids", 2, vector_bytes=64)


@pytest.mark.parametrize(("target", "lanes", "ahead"), [(AMD, 16, set()), (INTEL, 64, {4096})], ids=["amd", "intel"])
def test_arrays_are_read_as_the_prefetchers_like_it(target: Target, lanes: int, ahead: set[int]) -> None:
    assert target.machine.reads_ahead == (target is AMD)
    (report,) = torch_mlc.explain(lambda x, y: torch.where(y > 0, x * y, x - 0.5), *torch.zeros(2, 600, 1024)).kernels
    loops = [n for n, _ in walk_nodes(default_schedule(report.nest, target).nest.body) if isinstance(n, Loop)]
    assert {int(n.extent) for n in loops if n.kind is LoopKind.VECTORIZED} == {lanes}
    notes = [dict(n.annotations) for n in loops]
    assert {v for note in notes for k, v in note.items() if k.startswith("prefetch")} == ahead


def test_a_gpu_of_the_same_maker_is_none_of_its_processors() -> None:
    machine = gpu_target("hip:gfx942").machine
    assert not machine.reads_ahead and not machine.lanes_alone
