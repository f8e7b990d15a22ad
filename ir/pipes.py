"""What a multiprocessor (compute unit) does in a clock, and how long what it waits for takes: the figures of the static
model of a kernel's time, by architecture.

Rates: "Throughput of Native Arithmetic Instructions" of NVIDIA's CUDA C++ Programming Guide 13, in lanes a clock (that
page counts operations; a packed instruction of two halves or two floats is one lane here), and the white papers of
V100, T4, A100, H100 and of the RTX parts for products; AMD's CDNA 2, 3 and 4 white papers (four SIMDs of 16 lanes, a
quarter of that for transcendental functions, matrix cores by their peak rates).

Latencies of an idle machine, rounded, in clocks: Jia et al. 2019 (T4, arXiv:1903.07486), Luo et al. 2024 (A100, RTX
4090 and H100, arXiv:2402.13499), Jarmusch et al. 2025 (RTX 5080, arXiv:2507.10789), and the measurements of CDNA 2 and
3 by Chips and Cheese. What memory takes under load is half as long again, but on an H200: 25 KB in flight a
multiprocessor fill its memory, which makes 770 ns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Pipes:
    """Rates of one multiprocessor and latencies.

    In lanes a clock: ``issue`` are instructions of its schedulers, ``fma`` float32 multiplies and adds, ``imad``
    integer multiplies (and half-rate moves through that pipe), ``alu`` integer adds, logic, comparisons and selects,
    ``special`` transcendental functions and conversions, ``double`` float64, ``access`` loads, stores and shuffles.

    In bytes a clock: ``shared`` to and from shared memory (the first cache too), ``fabric`` from the second cache;
    ``product`` are multiply-adds a clock of half types in tensor (matrix) cores by groups of warps where there are
    such, ``warp_product`` by single warps.

    In clocks: ``shared_latency``, ``l2_latency``, ``memory_latency`` (idle) and ``loaded_latency`` (full),
    ``special_latency`` of special functions, shuffles and conversions, ``barrier`` of a barrier of a program.
    ``burst`` are the bytes that memory reads at once, and ``page_run`` those from which runs of bytes come at full
    rate.
    """

    issue: int = 128
    fma: int = 128
    imad: int = 64
    alu: int = 64
    special: int = 16
    double: int = 2
    access: int = 32
    shared: int = 128
    fabric: int = 64
    product: int = 512
    warp_product: int = 512
    shared_latency: int = 30
    l2_latency: int = 265
    memory_latency: int = 480
    loaded_latency: int = 720
    special_latency: int = 24
    barrier: int = 30
    burst: int = 64
    page_run: int = 128


TURING = Pipes(
    fma=64, product=512, warp_product=512, shared_latency=22, l2_latency=190, memory_latency=430, loaded_latency=650,
    burst=32, page_run=64,
)  # fmt: skip
VOLTA = replace(TURING, double=32, shared_latency=19, burst=64, page_run=128)
AMPERE = Pipes(fma=64, double=32, product=1024, warp_product=1024, memory_latency=465, loaded_latency=700)
# The parts for graphics, whose memory gives 32 bytes at a time.
AMPERE_SMALL = replace(AMPERE, fma=128, double=2, product=512, warp_product=512, burst=32, page_run=64)
ORIN = replace(AMPERE_SMALL, product=1024, warp_product=1024)
ADA = replace(AMPERE_SMALL, l2_latency=275, memory_latency=540, loaded_latency=810)
# Single warps reach three fifths of the products of groups (Luo et al.).
HOPPER = Pipes(double=64, product=2048, warp_product=1280, memory_latency=480, loaded_latency=1350)
BLACKWELL = replace(HOPPER, product=4096, warp_product=1024, l2_latency=360, memory_latency=650)
BLACKWELL_SMALL = replace(
    ADA, imad=64, alu=128, l2_latency=360, memory_latency=880, loaded_latency=1300, product=512, warp_product=512
)
# A wavefront takes each SIMD of 16 lanes four clocks.
CDNA2 = Pipes(
    issue=64, fma=64, imad=16, alu=64, special=16, double=64, access=64, shared=128, fabric=64, product=512,
    warp_product=512, shared_latency=64, l2_latency=280, memory_latency=800, loaded_latency=1200, special_latency=16,
    barrier=40,
)  # fmt: skip
CDNA3 = replace(CDNA2, product=1024, warp_product=1024, l2_latency=260, memory_latency=1500, loaded_latency=2000)
CDNA4 = replace(CDNA3, product=2048, warp_product=2048)
