"""How the tuning database tells this machine from others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.targets import cpu_target
from torch_mlc.runtime.tuning import machine
from torch_mlc.runtime.tuning.machine import machine_facts, part_of, tuning_database
from torch_mlc.scheduler.schedule.trace import Trace
from torch_mlc.scheduler.tuning.database import NO_PART, target_key


def test_rates_are_measured_among_fake_tensors_too() -> None:
    with FakeTensorMode():
        rates = part_of(cpu_target()).rates()
    assert set(rates) == {"copy", "float32"} and all(r > 0 for r in rates.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_gpu_that_is_not_here_is_of_no_part(tmp_path: Path) -> None:
    target = gpu_target("cuda:sm_90")
    assert part_of(target) == NO_PART and tuning_database(tmp_path / "x").key_of(target) == target_key(target)


def test_gpus_of_one_architecture_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = gpu_target("cuda:sm_90")
    monkeypatch.setattr(machine, "is_here", lambda _: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    keys = []
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        part_of.cache_clear()
        keys.append(tuning_database(tmp_path / "x").key_of(target))
    part_of.cache_clear()
    assert keys == [f"{target_key(target)}:nvidia-h100-80gb-hbm3", f"{target_key(target)}:nvidia-h200"]


@pytest.mark.gpu
def test_a_gpu_has_rates() -> None:
    from torch_mlc.runtime.targets import target_for

    part = part_of(target_for("cuda:0"))
    rates = part.rates()
    assert part.name and rates["copy"] > 50 and rates["float32"] > 1000


def test_a_session_says_nothing_of_people(tmp_path: Path) -> None:
    with tuning_database(tmp_path / "t.sqlite") as db:
        db.record("w", cpu_target(), Trace(), 1e-6)
        text = "\n".join(db.exported())
    assert '"copy":' in text and str(tmp_path) not in text
    known = {"python", "system", "torch", "triton", "llvmlite", "numpy", "cuda", "hip"}
    assert {"python", "system", "torch"} <= {name for name, _ in machine_facts()} <= known
