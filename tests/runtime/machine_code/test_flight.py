"""Bytes of loads in flight: one latency a wait, whatever was asked for before it."""

import pytest

from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.machine_code.amdgcn import read_amdgcn
from torch_mlc.runtime.machine_code.counts import count_runs
from torch_mlc.runtime.machine_code.flight import bytes_in_flight
from torch_mlc.runtime.machine_code.issue import IssueReport
from torch_mlc.runtime.machine_code.sass import parse_sass

KERNEL = """import triton.language as tl


@triton.jit
def f(in0_ptr, s0):
    for k0 in tl.range(0, 1000):
        x = tl.load(in0_ptr + k0)
"""
HEAD = ["\t.section\t.text.f", ".text.f:", '\t//## File "<torch_mlc kernel 0>", line 6']


def in_flight(*rows: str) -> float | None:
    text = "\n".join([*HEAD, *(r if r.startswith(".L") else f"        /*0000*/   {r} ;" for r in rows)])
    code = parse_sass(text, "f")
    return bytes_in_flight(code, count_runs(code, KERNEL, "f", {"s0": 0}, (1,)).runs)


LOAD = "LDG.E.128 R{0}, desc[UR6][R2.64]"
LOOP = ("CS2R R60, SRZ", ".L_x_0:")
AGAIN = ("IADD3 R60, PT, R60, 0x1, RZ", "ISETP.NE.U32.AND P0, PT, R60, 0x20, PT", "@P0 BRA `(.L_x_0)", "EXIT")


def test_loads_before_the_first_use_come_together() -> None:
    assert in_flight(LOAD.format(8), LOAD.format(12), "FADD R1, R8, R13", "EXIT") == 32
    # The second is asked for when the first has come.
    assert in_flight(LOAD.format(8), "FADD R1, R9, R9", LOAD.format(12), "FADD R1, R8, R15", "EXIT") == 16
    # An address that is loaded, too: eight bytes and sixteen in two latencies.
    assert in_flight("LDG.E.64 R2, desc[UR6][R4.64]", LOAD.format(8), "FADD R1, R8, R8", "EXIT") == 12
    assert in_flight("MOV R1, RZ", "EXIT") == 0


def test_a_loop_waits_once_an_iteration() -> None:
    body = (LOAD.format(8), LOAD.format(12), "FADD R1, R8, R1", "FADD R1, R12, R1")
    assert in_flight(*LOOP, *body, *AGAIN) == 32


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_steps_in_flight(ahead: int) -> None:
    """Copies to shared memory that are waited for iterations later, as pipelined loops make them."""
    copy = ("LDGSTS.E.BYPASS.128 [R5], desc[UR8][R2.64]", "LDGDEPBAR")
    body = (*copy, f"DEPBAR.LE SB0, {hex(ahead)}", "LDS.128 R8, [R5]", "FADD R1, R8, R1")
    found = in_flight(*copy * ahead, *LOOP, *body, *AGAIN)
    assert found == pytest.approx(16 * (ahead + 1), rel=0.1)


def test_a_load_of_the_next_iteration() -> None:
    """The value that this iteration uses was loaded in the one before."""
    body = ("MOV R20, R8", LOAD.format(8), "FADD R1, R20, R1")
    assert in_flight(LOAD.format(8), *LOOP, *body, *AGAIN) == pytest.approx(16, rel=0.1)


def test_tiles_by_descriptors_tell_no_size() -> None:
    assert in_flight("UTMALDG.2D [UR8], [UR4]", "EXIT") is None


@pytest.mark.parametrize(("left", "expected"), [(0, 32), (1, 32)])
def test_counters_of_loads(left: int, expected: float) -> None:
    rows = ["global_load_dwordx4 v[4:7], v[2:3], off", "global_load_dwordx4 v[8:11], v[2:3], off"]
    rows += [f"s_waitcnt vmcnt({left})", "v_add_f32 v1, v4, v4", "s_waitcnt vmcnt(0)", "v_add_f32 v1, v8, v8"]
    code = read_amdgcn("\n".join(["f:", *(f"\t{r}" for r in [*rows, "s_endpgm"]), ".Lfunc_end0:"]), "f")
    assert bytes_in_flight(code, [1.0] * len(code.instructions)) == expected


def test_what_a_multiprocessor_holds() -> None:
    machine = gpu_target("cuda:sm_90").machine
    many = IssueReport(0, 0, (), 10**6, 16.0)
    assert many.on_multiprocessor(256, 0.5, machine) == 16 * 1024
    few = IssueReport(0, 0, (), 66, 16.0)  # a program on half of the multiprocessors
    assert few.on_multiprocessor(256, 0.5, machine) == 16 * 128
    assert IssueReport(0, 0, (), 66).on_multiprocessor(256, 0.5, machine) is None
