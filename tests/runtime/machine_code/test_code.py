"""Machine code as text to instructions, loops, and how often each runs."""

import pytest

from torch_mlc.runtime.machine_code.amdgcn import read_amdgcn
from torch_mlc.runtime.machine_code.code import Blocks, Flow
from torch_mlc.runtime.machine_code.counter import constant_runs
from torch_mlc.runtime.machine_code.counts import count_runs
from torch_mlc.runtime.machine_code.sass import DisassemblyError, parse_sass

KERNEL = """import triton.language as tl


@triton.jit
def f(in0_ptr, s0):
    for k0 in tl.range(0, {high}):
        x = tl.load(in0_ptr + k0)
"""


def sass(*rows: str) -> str:
    head = ["\t.section\t.text.f", ".text.f:", '\t//## File "<torch_mlc kernel 0>", line 6']
    return "\n".join([*head, *(r if r.startswith(".L") or "//##" in r else f"        /*0000*/   {r} ;" for r in rows)])


LOOP = (
    "CS2R R4, SRZ", ".L_x_0:", "IADD3 R9, R3, R4, RZ", "LDG.E.128 R16, desc[UR6][R16.64]",
    "IADD3 R4, P0, R4, {step}, RZ", "ISETP.NE.U32.AND P0, PT, R4, {bound}, PT",
    "ISETP.NE.U32.AND.EX P0, PT, R2, RZ, PT, P0", "@P0 BRA `(.L_x_0)", "EXIT", ".L_x_1:", "BRA `(.L_x_1)",
)  # fmt: skip


def loop(step: str, bound: str) -> str:
    return sass(*(row.replace("{step}", step).replace("{bound}", bound) for row in LOOP))


@pytest.mark.parametrize(
    ("step", "bound", "runs"), [("0x1", "0x20", 32), ("0x400000", "0x2000000", 8), ("-1", "-7", 7)]
)
def test_a_counter_of_numbers(step: str, bound: str, runs: int) -> None:
    code = parse_sass(loop(step, bound), "f")
    (found,) = Blocks.of(code).loops()
    assert len(found.body) == 6 and constant_runs(code, found) == runs
    counted = count_runs(code, KERNEL.format(high=1000), "f", {"s0": 0}, (1,))
    # The trap behind the end is never reached.
    assert counted.runs == (1, *[runs] * 6, 1, 0) and counted.slots == 2 + 6 * runs and not counted.guessed


@pytest.mark.parametrize(
    ("begun", "runs"),
    [
        ("HFMA2.MMA R4, -RZ, RZ, 0, 3.814697265625e-06", 6), ("HFMA2.MMA R4, -RZ, RZ, 0, 0", 7),
        ("HFMA2.MMA R4, -RZ, RZ, 0, -QNAN", None), ("HFMA2.MMA R4, R1, RZ, 0, 0", None),
        # Thirty-two bits without a sign, of a number below zero.
        ("MOV R4, 0xfffffec0", 8),
    ],
)  # fmt: skip
def test_a_counter_that_begins_with_bits(begun: str, runs: int | None) -> None:
    text = loop("0x140", "0x7c0").replace("NE.U32", "GE.U32").replace("@P0 BRA", "@!P0 BRA")
    code = parse_sass(text.replace("CS2R R4, SRZ", begun), "f")
    (found,) = Blocks.of(code).loops()
    assert constant_runs(code, found) == runs


def test_what_the_disassembler_remarks_is_no_operand() -> None:
    code = parse_sass(sass("DEPBAR.LE SB0, 0x10                  ?WAIT4_END_GROUP", "EXIT"), "f")
    assert code.instructions[0].operands == ("SB0", "0x10")


def test_of_a_counter_of_64_bits_the_lower_half_tells_nothing() -> None:
    text = loop("0x6fb68a0", "0x2c0d5dd0").replace(
        "ISETP.NE.U32.AND.EX P0, PT, R2, RZ", "ISETP.NE.U32.AND.EX P0, PT, R2, 0xc5"
    )
    code = parse_sass(text, "f")
    (found,) = Blocks.of(code).loops()
    assert constant_runs(code, found) is None


def test_the_text_tells_where_the_counter_does_not() -> None:
    code = parse_sass(loop("0x1", "R8"), "f")
    counted = count_runs(code, KERNEL.format(high="s0"), "f", {"s0": 12}, (4,))
    assert counted.runs[1:7] == (12,) * 6 and not counted.guessed
    counted = count_runs(code, KERNEL.format(high="tl.load(in0_ptr)"), "f", {"s0": 12}, (4,))
    assert counted.runs[1:7] == (1,) * 6 and counted.guessed == (6,)


def test_uniform_counters_and_branches_that_are_calls() -> None:
    code = parse_sass(
        sass(
            "UMOV UR4, URZ", ".L_x_0:", "UIADD3 UR4, UP0, UR4, 0x4, URZ", "UISETP.GE.AND UP0, UPT, UR4, 0x1e, UPT",
            "PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0", "@P0 CALL.REL.NOINC `(.L_x_2)", "BRA `(.L_x_0)", ".L_x_2:",
            "EXIT",
        ),
        "f",
    )  # fmt: skip
    (found,) = Blocks.of(code).loops()
    assert constant_runs(code, found) == 8


def test_what_is_called_is_rare() -> None:
    text = sass(
        "MUFU.RCP R5, R8", "@!P0 BRA `(.L_x_2)", "MOV R2, 0x3b80", "CALL.REL.NOINC `($__internal_0_$slowpath)",
        ".L_x_2:", "EXIT",
    )  # fmt: skip
    code = parse_sass(f"{text}\n$__internal_0_$slowpath:\n        /*0000*/   MOV R1, R2 ;", "f")
    assert [i.flow for i in code.instructions] == [Flow.ON, Flow.BRANCH, Flow.ON, Flow.CALL, Flow.END]
    assert count_runs(code, KERNEL.format(high=1), "f", {}, (1,)).runs == (1, 1, 0, 0, 1)


def test_lines_of_other_files_are_none() -> None:
    code = parse_sass(sass("MOV R1, R2", '\t//## File "/x/standard.py", line 287', "MOV R3, R4"), "f")
    assert [i.line for i in code.instructions] == [6, 0]


def test_no_such_kernel() -> None:
    with pytest.raises(DisassemblyError, match="g: no code of that name"):
        parse_sass(loop("1", "2"), "g")


def test_amdgcn() -> None:
    text = """
f:                                      ; @f
.Lfunc_begin0:
	.file	1 "<torch_mlc kernel 0>"
	.file	2 "/x" "standard.py"
	.loc	1 6 0
	s_mov_b32 s6, 0
.LBB0_1:                                ; =>This Inner Loop
	global_load_dwordx4 v[22:25], v[22:23], off
	s_add_i32 s6, s6, 2
	s_cmp_lg_u32 s6, 32
	.loc	2 287 0
	v_add_f32_e32 v1, v2, v3
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	s_endpgm
.Lfunc_end0:
	v_nop
"""
    code = read_amdgcn(text, "f")
    assert [i.line for i in code.instructions] == [6, 6, 6, 6, 0, 0, 0]
    counted = count_runs(code, KERNEL.format(high=32), "f", {}, (1,))
    assert counted.runs == (1, 16, 16, 16, 16, 16, 1)
    # Scalar instructions are issued beside those of the vector units.
    assert counted.slots == 32


FLATTENED = """import triton.language as tl


@triton.jit
def f(in0_ptr, s0):
    for k0 in tl.range(0, 2, flatten=True):
        for k1 in tl.range(0, 16):
            x = tl.load(in0_ptr + k1)
        tl.store(in0_ptr + k0, x)
"""


@pytest.mark.parametrize("bound", ["0x20", "R8"])
@pytest.mark.parametrize("stores", [1, 20])
def test_of_loops_made_one_the_outer_has_its_own_share(stores: int, bound: str) -> None:
    """What stands behind the inner loop is left out by most iterations: 2 of 32 store. However much that is, the steps
    are the inner loop's, also where the text alone tells how many."""
    code = parse_sass(
        sass(
            "CS2R R4, SRZ", ".L_x_0:", '\t//## File "<torch_mlc kernel 0>", line 8', "LDG.E.128 R16, desc[UR6][R16.64]",
            "ISETP.NE.U32.AND P1, PT, R9, 0xf, PT", "@P1 BRA `(.L_x_2)",
            '\t//## File "<torch_mlc kernel 0>", line 9', *["STG.E.128 desc[UR6][R16.64], R16"] * stores, ".L_x_2:",
            "IADD3 R4, P0, R4, 0x1, RZ", f"ISETP.NE.U32.AND P0, PT, R4, {bound}, PT", "@P0 BRA `(.L_x_0)", "EXIT",
        ),
        "f",
    )  # fmt: skip
    runs = count_runs(code, FLATTENED, "f", {"s0": 0}, (1,)).runs
    assert runs == (1, 32, 32, 32, *[2] * stores, 32, 32, 32, 1)


BRANCHED = """import triton.language as tl


@triton.jit
def f(in0_ptr, s0):
    if tl.program_id(0) < 7:
        x = tl.load(in0_ptr)
    else:
        y = tl.load(in0_ptr + 1)
"""


def test_sides_of_a_branch_count_as_often_as_programs_take_them() -> None:
    code = parse_sass(
        sass(
            "S2R R4, SR_CTAID.X", "@P0 BRA `(.L_x_0)", '\t//## File "<torch_mlc kernel 0>", line 7',
            "LDG.E.128 R16, desc[UR6][R16.64]", "EXIT", ".L_x_0:", '\t//## File "<torch_mlc kernel 0>", line 9',
            "LDG.E.U16 R16, desc[UR6][R16.64]", "EXIT",
        ),
        "f",
    )  # fmt: skip
    assert count_runs(code, BRANCHED, "f", {"s0": 0}, (8,)).runs == (1, 1, 7 / 8, 7 / 8, 1 / 8, 1 / 8)
