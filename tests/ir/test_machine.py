"""What GPUs can do follows from their capability, for families and for processors that nobody knew of."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.machine import KNOWN
from torch_mlc.ir.target import Target, TargetError, gpu_target

KB = 1 << 10
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("cuda:sm_75", 65536), ("cuda:sm_80", 166912), ("cuda:sm_86", 101376), ("cuda:sm_87", 166912),
        ("cuda:sm_89", 101376), ("cuda:sm_90", 232448), ("cuda:sm_100", 232448), ("cuda:sm_103", 232448),
        ("cuda:sm_110", 232448), ("cuda:sm_120", 101376), ("cuda:sm_121", 101376),
        ("hip:gfx90a", 65536), ("hip:gfx942", 65536), ("hip:gfx950", 163840),
    ],
)  # fmt: skip
def test_shared_memory_of_a_block_is_as_the_vendors_tables_have_it(name: str, shared: int) -> None:
    target = gpu_target(name)
    assert target.shared_bytes == shared and str(target) == name
    assert target.machine.block_shared == shared


AMPERE = {"ptx", "tanh", "pairs", "float16", "int8", "steps", "bfloat16"}
CAN = {
    "cuda:sm_75": {"ptx", "tanh"},
    "cuda:sm_80": AMPERE | {"operands_ahead"},
    "cuda:sm_89": AMPERE | {"operands_ahead", "float8"},
    "cuda:sm_90": AMPERE | {"float8", "tma", "dependent_launches", "wgmma", "group_products"},
    "cuda:sm_100": AMPERE | {"float8", "tma", "dependent_launches", "tcgen05", "group_products"},
    "cuda:sm_120": AMPERE | {"float8", "tma", "dependent_launches"},
    "hip:gfx90a": {"float16", "int8", "steps", "bfloat16"},
    "hip:gfx942": {"float16", "int8", "steps", "bfloat16", "float8"},
}
FAMILIES = {"cuda:sm_103": "cuda:sm_100", "cuda:sm_110": "cuda:sm_100", "cuda:sm_121": "cuda:sm_120",
            "cuda:sm_86": "cuda:sm_80", "hip:gfx950": "hip:gfx942"}  # fmt: skip
UNKNOWN = {"cuda:sm_91": "cuda:sm_90", "cuda:sm_105": "cuda:sm_103", "cuda:sm_129": "cuda:sm_121",
           "cuda:sm_140": "cuda:sm_121", "hip:gfx955": "hip:gfx950"}  # fmt: skip


def can(name: str) -> set[str]:
    target = gpu_target(name)
    found = {p.removeprefix("has_") for p in dir(target) if p.startswith("has_") and getattr(target, p)}
    assert all(isinstance(getattr(target, f"has_{p}"), bool) for p in found)
    multiplied = {t.value.partition("_")[0] for t in DType if target.multiplies(t)}
    return found | multiplied | ({"steps"} if target.machine.stages > 1 else set())


@pytest.mark.parametrize("name", CAN)
def test_capabilities(name: str) -> None:
    assert can(name) == CAN[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_members_of_a_family_can_do_the_same(name: str) -> None:
    assert can(name) == can(FAMILIES[name])


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_processors_are_taken_for_the_newest_before_them(name: str) -> None:
    ours, known = gpu_target(name), gpu_target(UNKNOWN[name])
    assert can(name) == can(UNKNOWN[name]) and str(ours) == name
    assert (ours.shared_bytes, ours.cores, ours.warp) == (known.shared_bytes, known.cores, known.warp)


def test_the_assembler_s_names_are_those_of_the_processor() -> None:
    assert gpu_target("cuda:sm_90a") == gpu_target("cuda:sm_90") and gpu_target("cuda:sm_103f").arch == "sm_103"


@pytest.mark.parametrize(
    "name", ["cuda:sm_60", "cuda:gfx942", "hip:gfx906", "hip:gfx1100", "hip:sm_90", "cuda:", "tpu:v5"]
)
def test_what_is_too_old_or_none_of_them_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match=f"no target '{name}'.*cuda:sm_103.*hip:gfx950"):
        gpu_target(name)


def test_no_decision_asks_for_a_processor_by_name() -> None:
    """A list of names leaves out what comes next: decisions ask for what a target can do."""
    asks = re.compile(r"\.arch\s*(?:==|!=|in\b|not in\b)\s*[\"'(\[{]|\.arch\.(?:startswith|endswith)")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for room in ("ir", "scheduler", "codegen", "runtime", "dynamo_backend", "benchmarks")
        for path in sorted((ROOT / room).rglob("*.py"))
        for line in path.read_text().splitlines()
        if asks.search(line) and "znver" not in line
    ]
    assert found == []


def test_each_machine_has_figures_of_its_own() -> None:
    known = [gpu_target(name).machine for name in KNOWN]
    assert len({m.part for m in known}) == len({(m.cores, m.bandwidth, m.matmul) for m in known}) == len(KNOWN)
    for m in known:
        intensity = m.matmul / m.bandwidth  # operations a byte
        assert 50 < intensity < 900 and m.float32 < m.matmul and m.cores * 64 < m.issued < m.cores * 128 * 3, m


def test_libraries_reach_tensor_cores_that_kernels_do_not() -> None:
    """Triton has no instructions for those before compute capability 8.0."""
    old, new = (gpu_target(f"cuda:{arch}").machine for arch in ("sm_75", "sm_80"))
    assert old.multiplied == {DType.FLOAT16, DType.INT8} and not old.in_kernels and old.stages == 1
    assert new.multiplied == new.in_kernels == old.multiplied | {DType.BFLOAT16}


def test_what_is_found_of_a_machine_counts_more_than_its_usual_part() -> None:
    usual = gpu_target("cuda:sm_90")
    part = replace(usual, cores=66, shared_bytes=100 * KB, l2_bytes=25 << 20)
    assert part.machine == replace(
        usual.machine, cores=66, block_shared=100 * KB, l2_bytes=25 << 20, matmul=usual.machine.matmul / 2,
        float32=usual.machine.float32 / 2, issued=usual.machine.issued / 2,
    )  # fmt: skip
    assert (usual.machine.bandwidth, usual.machine.matmul, usual.machine.float32) == (4300.0, 790e3, 50e3)


def test_a_cpu_has_what_the_system_tells() -> None:
    wide = Target("cpu", "znver5", 6, 64, 48 * KB, 1 << 20, warp=1, max_threads=1)
    narrow = replace(wide, vector_bytes=16)
    assert (wide.machine.cores, wide.machine.l1_bytes, wide.machine.l2_bytes) == (6, 48 * KB, 1 << 20)
    assert narrow.machine.matmul == wide.machine.matmul / 2 and narrow.machine.bandwidth == wide.machine.bandwidth
    assert not replace(wide, warp=32).machine.is_gpu, "a target says what it is by its kind"
