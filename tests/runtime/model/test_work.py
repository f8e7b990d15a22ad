"""What instructions ask of a multiprocessor, how long a warp takes by itself, and what passes to and from memory."""

from dataclasses import replace

import pytest

from torch_mlc.ir.target import gpu_target
from torch_mlc.runtime.machine_code.amdgcn import read_amdgcn
from torch_mlc.runtime.machine_code.code import Code, Control, Instruction
from torch_mlc.runtime.machine_code.counts import Counted
from torch_mlc.runtime.machine_code.sass import control_of, parse_sass
from torch_mlc.runtime.model.alone import warp_clocks
from torch_mlc.runtime.model.opcodes import Pipe, by_groups, cached_bytes, pipes_of, products_of
from torch_mlc.runtime.model.work import ArrayTraffic, memory_bytes, tile_products, work_of
from torch_mlc.runtime.triton.compile import GpuBinary

H200, MI300 = gpu_target("cuda:sm_90").machine, gpu_target("hip:gfx942").machine
assert H200.pipes is not None
P = H200.pipes
BINARY = GpuBinary("f", "cuda", "sm_90", b"", "", (), 0, 128, 0, ())


def clocks(*instructions: Instruction, latency: float = 500.0, runs: float = 1.0) -> float:
    return warp_clocks(Code(instructions), [runs] * len(instructions), H200, latency)


def ins(opcode: str, *operands: str, stall: int = 1, sets: int = -1, waits: tuple[int, ...] = ()) -> Instruction:
    return Instruction(opcode, operands, control=Control(stall, sets, -1, waits))


@pytest.mark.parametrize(
    ("opcode", "pipes"),
    [
        ("FFMA", (Pipe.FMA,)), ("HFMA2.MMA", (Pipe.FMA,)), ("IMAD.MOV.U32", (Pipe.FMA, Pipe.IMAD)),
        ("LOP3.LUT", (Pipe.ALU,)), ("BRA", ()),
        ("MUFU.EX2", (Pipe.SPECIAL,)), ("DFMA", (Pipe.DOUBLE,)), ("LDG.E.128", (Pipe.ACCESS,)), ("UIADD3", ()),
        ("HGMMA.64x64x16.F32.BF16", ()), ("v_exp_f32_e32", (Pipe.SPECIAL,)), ("v_fma_f64", (Pipe.DOUBLE,)),
        ("v_mul_lo_u32", (Pipe.IMAD,)), ("v_pk_mul_f32", (Pipe.FMA,)), ("v_cndmask_b32_e32", (Pipe.ALU,)),
        ("global_load_dwordx4", (Pipe.ACCESS,)), ("v_mfma_f32_32x32x8_bf16", ()), ("s_add_i32", ()),
    ],
)  # fmt: skip
def test_pipes(opcode: str, pipes: tuple[Pipe, ...]) -> None:
    assert pipes_of(opcode) == pipes


@pytest.mark.parametrize(
    ("opcode", "products"),
    [
        ("HMMA.16816.F32.BF16", 16 * 8 * 16), ("HMMA.1688.F32.TF32", 2 * 16 * 8 * 8), ("IMMA.16832.S8.S8", 16 * 8 * 16),
        ("HGMMA.64x128x16.F32.BF16", 64 * 128 * 16 / 4), ("QGMMA.64x64x32.F32.E4M3.E4M3", 64 * 64 * 32 / 8),
        ("v_mfma_f32_32x32x8_bf16", 32 * 32 * 8), ("v_mfma_f32_32x32x2_f32", 8 * 32 * 32 * 2),
        ("v_mfma_f32_16x16x32_fp8_fp8", 16 * 16 * 16), ("v_mfma_f32_4x4x4_16b_f16", 16 * 4 * 4 * 4),
        ("HFMA2.MMA", 0), ("FFMA", 0),
    ],
)  # fmt: skip
def test_products(opcode: str, products: float) -> None:
    assert products_of(opcode) == products


def test_products_of_groups_and_their_operands() -> None:
    assert by_groups("HGMMA.64x64x16.F32.BF16") and not by_groups("HMMA.16816.F32.BF16")
    # 128 threads read 64 columns of 32 bytes, and as many rows unless those are in registers.
    shared = Instruction("HGMMA.64x64x16.F32.BF16", ("R24", "gdesc[UR8]", "R24"))
    assert cached_bytes(shared) == 32 and cached_bytes(replace(shared, operands=("R24", "R88", "gdesc[UR8]"))) == 16
    assert cached_bytes(Instruction("LDSM.16.M88.4")) == 16 and cached_bytes(Instruction("ds_read2st64_b64")) == 16


def test_tiles_in_tensor_memory() -> None:
    ptx = "\tmov.b32 \t%r77, 68158608;\n"
    ptx += "\t@%p13 tcgen05.mma.cta_group::1.kind::f16 [ %r930 + 0 ], %rd38, %rd39, %r77, %p12;\n"
    assert tile_products(ptx) == 64 * 64 * 16 and tile_products("ret;") == 0


def test_control_of_an_instruction() -> None:
    assert control_of(0x000E220000002100) == Control(1, 0, -1, ())  # S2R R3, SR_TID.X
    assert control_of(0x041FE400000006FF) == Control(2, -1, -1, (0,))  # waits for it
    text = ".text.f:\n        /*0010*/                   S2R R3, SR_TID.X ;   /* 0x0000000000037919 */\n"
    (i,) = parse_sass(f"{text}                        /* 0x000e620000002100 */\n", "f").instructions
    assert i.opcode == "S2R" and i.control.sets == 1


def test_a_warp_waits_for_what_it_uses() -> None:
    load = ins("LDG.E.128", "R4", "desc[UR6][R2.64]", sets=0)
    assert clocks(load, ins("FADD", stall=4, waits=(0,))) == 504
    assert clocks(load, ins("FADD", stall=4)) == 5
    # Two loads at a time wait once, one behind the other twice.
    assert clocks(load, ins("LDG.E", sets=1), ins("FADD", waits=(0, 1))) == 502
    assert clocks(load, ins("LDG.E", sets=1, waits=(0,)), ins("FADD", waits=(1,))) == 1001
    assert clocks(ins("LDS", sets=2), ins("FADD", waits=(2,))) == P.shared_latency + 1
    assert clocks(ins("MUFU.EX2", sets=2), ins("FADD", waits=(2,))) == P.special_latency + 1
    assert clocks(ins("BAR.SYNC")) == 1 + P.barrier


def test_copies_in_groups() -> None:
    copy, commit = ins("LDGSTS.E.BYPASS.128"), ins("LDGDEPBAR", sets=0)
    wait = {n: ins("DEPBAR.LE", "SB0", hex(n)) for n in (0, 1)}
    assert clocks(copy, commit, copy, commit, wait[1]) == 501  # the first of two
    assert clocks(copy, commit, copy, commit, wait[0]) == 503


def test_tensor_cores_take_products_in_turn() -> None:
    one = 64 * 64 * 16 / 4 / (P.product / 4)
    product = ins("HGMMA.64x64x16.F32.BF16", "R24", "gdesc[UR8]", "R24")
    last = ins("HGMMA.64x64x16.F32.BF16", "R24", "gdesc[UR8]", "R24", "gsb0")
    wait = ins("WARPGROUP.DEPBAR.LE", "gsb0", "0x0")
    assert clocks(product, product, last, wait) == 3 * one + 1
    assert clocks(last, last, ins("WARPGROUP.DEPBAR.LE", "gsb0", "0x1"), *[ins("FADD", stall=15)] * 20) == one + 301
    warp = 16 * 8 * 16 / (P.warp_product / 4)
    assert clocks(*[ins("HMMA.16816.F32.BF16")] * 5) == pytest.approx(5 * warp)


def test_a_loop_takes_as_often_as_long() -> None:
    text = """.text.f:
        /*0000*/   CS2R R60, SRZ ;
.L_x_0:
        /*0010*/   FADD R1, R1, R1 ;
        /*0020*/   IADD3 R60, PT, R60, 0x1, RZ ;
        /*0030*/   ISETP.NE.U32.AND P0, PT, R60, 0x40, PT ;
        /*0040*/   @P0 BRA `(.L_x_0) ;
        /*0050*/   EXIT ;"""
    code = parse_sass(text, "f")
    assert warp_clocks(code, [1, 64, 64, 64, 64, 1], H200, 500) == 2 + 4 * 64


@pytest.mark.parametrize("every", [2, 16, 64, 256])
@pytest.mark.parametrize("never", [0, 1])
def test_what_few_iterations_have_takes_as_often_as_it_runs(every: int, never: int) -> None:
    """Of two loops made one, what stands behind the inner one; an instruction that never runs leaves a loop one."""
    rows = ["CS2R R60, SRZ", ".L_x_0:", "FADD R1, R1, R1", "@P1 BRA `(.L_x_2)", *["FMUL R2, R1, R1"] * 100]
    rows += ["MUFU.RCP R3, R1"] * never + [".L_x_2:", "@P0 BRA `(.L_x_0)", "EXIT"]
    text = "\n".join(["\t.section\t.text.f", ".text.f:", *(r if r[0] == "." else f" /*0000*/ {r} ;" for r in rows)])
    loop, tiles = 1024.0, 1024 // every
    runs = [1, loop, loop, *[tiles] * 100, *[0] * never, loop, 1]
    assert warp_clocks(parse_sass(text, "f"), runs, H200, 500) == 2 + 3 * loop + 100 * tiles


def test_counters_of_amd() -> None:
    rows = [
        "global_load_dwordx4 v[4:7], v[2:3], off",
        "ds_read_b64 v[8:9], v1",
        "s_waitcnt vmcnt(0)",
        "v_add_f32 v1, v4, v4",
    ]
    code = read_amdgcn("\n".join(["f:", *(f"\t{r}" for r in [*rows, "s_endpgm"]), ".Lfunc_end0:"]), "f")
    # Four clocks an instruction: a wavefront is as wide as four SIMDs.
    assert warp_clocks(code, [1.0] * 5, MI300, 1000) == 1000 + 3 * 4


def test_the_work_of_a_launch() -> None:
    code = Code(
        (ins("LDG.E.128", "R4", "desc[UR6][R2.64]", sets=0), ins("FADD", waits=(0,)), ins("HMMA.16816.F32.BF16"))
    )
    arrays = [ArrayTraffic(1 << 20, 1 << 20, 0, contiguous=512)]
    work = work_of(Counted(code, (2.0, 3.0, 1.0)), BINARY, 512, 4, arrays, H200)
    assert work.slots == 6 * 128 and work.lanes == {Pipe.ACCESS: 256, Pipe.FMA: 384}
    assert work.products == 4 * 2048 and not work.grouped and work.cached == 2 * 16 * 128
    assert work.moved == work.memory == 1 << 20 and work.alone[0] < work.alone[1]


def passed(array: ArrayTraffic, programs: int = 1320, others: tuple[ArrayTraffic, ...] = ()) -> float:
    return memory_bytes(array, programs, 1, [array, *others], H200) / array.touched


def test_what_passes_to_and_from_memory() -> None:
    large = 8 * H200.l2_bytes
    assert passed(ArrayTraffic(large, large, 0)) == 1
    assert passed(ArrayTraffic(large, large, large)) == 2
    # What a program reads twice is in the cache where all that is read meanwhile is: here a hundredth of the array, or
    # of few programs all of it.
    assert passed(ArrayTraffic(large, 2 * large, 0), 13200) == 1
    assert 1.8 < passed(ArrayTraffic(large, 2 * large, 0), 132) < 2
    # What it is asked to keep is there beside what is written.
    row = H200.l2_bytes // 150
    kept, out = (
        (ArrayTraffic(1320 * row, 2 * 1320 * row, 0, kept=k) for k in (True, False)),
        ArrayTraffic(1320 * row, 0, 1320 * row),
    )
    assert [round(passed(a, others=(out,)), 2) for a in kept] == [1.0, 1.43]
    # What other programs read at the same time is fetched once; later again, unless all of it stays.
    assert passed(ArrayTraffic(large, large, 0, sharing=8, rounds=1)) == 1
    assert passed(ArrayTraffic(large, large, 0, sharing=8, rounds=4)) == 1 + 3 * 7 / 8
    small = H200.l2_bytes // 4
    assert passed(ArrayTraffic(small, small, 0, sharing=8, rounds=4)) == 1


@pytest.mark.parametrize(("contiguous", "times"), [(128, 1), (512, 1), (None, 1), (64, 2**0.5), (32, 2), (2, 16)])
def test_short_runs_cost_whole_bursts(contiguous: int | None, times: float) -> None:
    large = 1 << 30
    assert passed(ArrayTraffic(large, large, 0, contiguous=contiguous)) == pytest.approx(times)
