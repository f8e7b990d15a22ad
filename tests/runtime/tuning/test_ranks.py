"""Ranks of a job take the same schedules, whatever each of them would have found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from torch_mlc.ir.target import Target
from torch_mlc.runtime.tuning.ranks import Ranks
from torch_mlc.scheduler.schedule.trace import Step, Trace

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
CPU = Target("cpu", "znver3", 2)


def trace(n: int) -> Trace:
    return Trace((Step("unroll", (("loop", f"i{n}"),)),), "by hand")


def test_each_rank_decides_its_share_first() -> None:
    store, asked = dist.HashStore(), list[tuple[int, int]]()

    def decide(rank: int) -> Any:
        def found(number: int) -> Trace | None:
            asked.append((rank, number))
            return trace(10 * number + rank) if number != 2 else None

        return found

    second = Ranks(store, 1, 2, wait=0.05).agreed(CPU, ["a", "b", "c"], decide(1))
    # Nobody has decided of the first and the last: they are default ones for good.
    assert second == [None, trace(11), None] and asked == [(1, 1)]
    assert Ranks(store, 0, 2).agreed(CPU, ["a", "b", "c", "d", "e"][:3], decide(0)) == second and asked == [(1, 1)]


def test_what_cannot_be_decided_is_the_default_everywhere() -> None:
    store = dist.HashStore()

    def fail(number: int) -> Trace | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Ranks(store, 0, 2).agreed(CPU, ["a"], fail)
    assert Ranks(store, 1, 2, wait=5.0).agreed(CPU, ["a"], fail) == [None]


def test_targets_are_decided_apart() -> None:
    store = dist.HashStore()
    assert Ranks(store, 0, 1).agreed(CPU, ["a"], lambda _: trace(1)) == [trace(1)]
    assert Ranks(store, 0, 1).agreed(CPU, ["a"], lambda _: trace(2)) == [trace(1)]
    assert Ranks(store, 0, 1).agreed(Target("cpu", "znver4", 2), ["a"], lambda _: trace(2)) == [trace(2)]


def test_what_is_no_schedule_is_the_default() -> None:
    store = dist.HashStore()
    ranks = Ranks(store, 0, 1)
    ranks.agreed(CPU, ["a"], lambda _: trace(1))
    (key,) = [k for k in store.list_keys() if k.endswith("a")] if hasattr(store, "list_keys") else [None]
    if key is None:
        pytest.skip("this torch does not list a store's keys")
    store.set(key, "[" * 9999)
    assert ranks.agreed(CPU, ["a"], lambda _: trace(1)) == [None]


def test_one_process_has_no_ranks() -> None:
    assert Ranks.of_job() is None


_RANK = """
import json, os, sys
import torch.distributed as dist
from torch_mlc.ir.text.parser import parse
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.tuning.measuring import measurer_for
from torch_mlc.runtime.tuning.ranks import Ranks
from torch_mlc.scheduler.schedule.schedule import replay
from torch_mlc.scheduler.tuning.database import Workload
from torch_mlc.scheduler.tuning.tune import tune

TEXT = '''
@nest(outputs=["out0"])
def rows(in0: float32[{n}, 33], out0: float32[{n}]):
    for a in serial({n}):
        for b in serial(33):
            with block("b0"):
                i = spatial({n}, a)
                r = reduction(33, b)
                out0[i] = sum.update(in0[i, r])
'''
rank, folder, lost = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
ranks, mine = Ranks.of_job(wait=3.0 if lost > 0 else 120.0), []
nests = [parse(TEXT.format(n=n)) for n in (64, 96, 200)]

def decide(number):
    if number == lost:
        os._exit(9)
    mine.append(number)
    return tune(nests[number], cpu_target(2), measurer_for(nests[number], cpu_target(2)), 0.3).trace

found = ranks.agreed(cpu_target(2), [Workload.of(n).key for n in nests], decide)
for nest, trace in zip(nests, found):
    if trace is not None:
        replay(trace, nest)
print(json.dumps([mine, [t and t.to_json() for t in found]]))
if lost < 0:
    dist.barrier()
    dist.destroy_process_group()
os._exit(sys.stdout.flush() or 0)
"""


@pytest.mark.parametrize("lost", [-1, 1], ids=["both", "one is lost"])
def test_processes_of_a_job_agree(tmp_path: Path, lost: int) -> None:
    """On gloo, each measuring its share; where one goes before it has decided, the default is for all."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path), str(lost)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [p.communicate(timeout=200) for p in processes]
    if lost > 0:
        assert processes[1].returncode == 9
        mine, found = json.loads(told[0][0])
        assert mine == [0, 2] and found[1] is None and found[0] and found[2]
        return
    assert [p.returncode for p in processes] == [0, 0], told
    (first, found), (second, same) = (json.loads(out) for out, _ in told)
    assert (first, second) == ([0, 2], [1]) and found == same and all(found)
