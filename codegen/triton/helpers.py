"""Device functions that generated kernels may call, as text: each goes into the sources that use it.

They are text, not imported functions, so that a kernel's source is all there is to compile, hash and read.
"""

from __future__ import annotations

import re

from ...ir.target import Target
from .approximations import approximation_source
from .iterations import intrinsic_source, iteration_source
from .packed.eight_bits import conversion_source
from .packed.pairs import pair_source
from .types import Types

HELPERS: dict[str, str] = {
    "mlc_floordiv": '''
@triton.jit
def mlc_floordiv(a, b):
    """Integer division that rounds towards minus infinity."""
    q = a // b
    return tl.where((a % b != 0) & ((a < 0) != (b < 0)), q - 1, q)
''',
    "mlc_remainder": '''
@triton.jit
def mlc_remainder(a, b):
    """Integer remainder with the sign of the divisor."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
''',
    "mlc_remainder_float": '''
@triton.jit
def mlc_remainder_float(a, b):
    """Remainder with the sign of the divisor."""
    r = libdevice.fmod(a, b)
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)
''',
    "mlc_floordiv_float": '''
@triton.jit
def mlc_floordiv_float(a, b):
    """Floor of a quotient, exact where the quotient is; a / b for a zero divisor."""
    r = libdevice.fmod(a, b)
    q = (a - r) / b
    q = tl.where((r != 0) & ((b < 0) != (r < 0)), q - 1.0, q)
    f = libdevice.floor(q)
    f = tl.where(q - f > 0.5, f + 1.0, f)
    return tl.where(b == 0, a / b, tl.where(q == 0, libdevice.copysign(q * 0.0, a / b), f))
''',
    "mlc_held": '''
@triton.jit
def mlc_held(a):
    """The same elements of two bytes, two in a register, of which the compiler does not know that they are the same:
    the third number of a program is zero."""
    return tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r,r", [a, tl.program_id(2)], dtype=a.dtype, is_pure=True, pack=2
    )
''',
    "mlc_as_loaded": '''
@triton.jit
def mlc_as_loaded(a, pointer):
    """The same whole numbers, as a load of which no lane is performed gives them: numbers of programs are not
    negative."""
    nowhere = tl.cast(pointer, tl.pointer_type(a.dtype), bitcast=True) + tl.zeros_like(a)
    return tl.load(nowhere, mask=tl.zeros_like(a) + tl.program_id(0) < 0, other=a)
''',
    "mlc_pow": '''
@triton.jit
def mlc_pow(a, b):
    """Integer power that wraps; a negative exponent leaves 1 and -1 and takes the rest to zero."""
    result = (a * 0 + 1) + b * 0
    base = a + b * 0
    e = tl.where(b < 0, b % 2, b)
    e = tl.where(e < 0, 0 - e, e)
    for _ in range(0, 64):
        result = tl.where((e & 1) != 0, result * base, result)
        base = base * base
        e = e >> 1
    return tl.where((b < 0) & (a != 1) & (a + 1 != 0), result * 0, result)
''',
    "mlc_digamma": '''
@triton.jit
def mlc_digamma(a):
    """Digamma: reflection below zero, recurrence up to ten, asymptotic series."""
    negative = a <= 0
    y = tl.where(negative, 1.0 - a, a)
    total = tl.where(y == y, 0.0, y)
    for _ in tl.static_range(10):
        small = y < 10.0
        total = tl.where(small, total - 1.0 / y, total)
        y = tl.where(small, y + 1.0, y)
    z = 1.0 / (y * y)
    series = 0.08333333333333333 - z * (0.008333333333333333 - z * (0.003968253968253968 - z * (
        0.004166666666666667 - z * (0.007575757575757576 - z * 0.021092796092796094))))
    result = total + libdevice.log(y) - 0.5 / y - z * series
    fraction = a - libdevice.trunc(a)
    reflected = result - 3.141592653589793 / libdevice.tan(3.141592653589793 * fraction)
    result = tl.where(negative, tl.where(fraction == 0, float("nan"), reflected), result)
    return tl.where(a == 0, libdevice.copysign(a * 0.0 + float("inf"), a * -1.0), result)
''',
    "mlc_any": '''
@triton.jit
def mlc_any(a):
    """Whether a condition holds in any element of a tile, or of a scalar."""
    if a.type.is_block():
        return tl.max(a.to(tl.int32)) > 0
    else:
        return a
''',
    "mlc_philox": '''
@triton.jit
def mlc_philox(seed, offset):
    """The words of Philox4x32-10 with key ``seed`` and counter ``(offset, 0)``."""
    low = (offset & 0xFFFFFFFF).to(tl.uint32)
    high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = low ^ low
    return tl.philox(seed, low, high, zero, zero)
''',
    # Of lanes that are no neighbours for sure. Those of them that one thread has ask for the same words, and where the
    # compiler sees that, it makes them once.
    "mlc_word": '''
@triton.jit
def mlc_word(seed, offset):
    """A word of the stream of a seed."""
    w0, w1, w2, w3 = mlc_philox(seed, offset >> 2)
    which = offset & 3
    return tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
''',
    "mlc_word_pair": '''
@triton.jit
def mlc_word_pair(seed, offset):
    """Two words of the stream of a seed."""
    w0, w1, w2, w3 = mlc_philox(seed, offset >> 1)
    first = (offset & 1) == 0
    return tl.where(first, w0, w2), tl.where(first, w1, w3)
''',
    "mlc_words_tile": '''
@triton.jit
def mlc_words_tile(seed, group, order: tl.constexpr, shape: tl.constexpr):
    """A word for each lane of a tile, of which four neighbours are a group: ``order`` is that of the dimensions."""
    w0, w1, w2, w3 = mlc_philox(seed, group)
    return tl.reshape(tl.permute(tl.join(tl.join(w0, w2), tl.join(w1, w3)), order), shape)
''',
    "mlc_word_pairs_tile": '''
@triton.jit
def mlc_word_pairs_tile(seed, group, order: tl.constexpr, shape: tl.constexpr):
    """Two words for each lane of a tile, of which two neighbours are a group."""
    w0, w1, w2, w3 = mlc_philox(seed, group)
    first = tl.reshape(tl.permute(tl.join(w0, w2), order), shape)
    return first, tl.reshape(tl.permute(tl.join(w1, w3), order), shape)
''',
    "mlc_uniform": '''
@triton.jit
def mlc_uniform(word):
    """Uniform in [0, 1), of a word."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08
''',
    "mlc_normal": '''
@triton.jit
def mlc_normal(w0, w1):
    """Standard normal by Box and Muller, of two words."""
    u = ((w0 >> 8) + 1).to(tl.float32) * 5.9604644775390625e-08
    v = (w1 >> 8).to(tl.float32) * 5.9604644775390625e-08
    return tl.sqrt_rn(-2.0 * libdevice.log(u)) * libdevice.cos(6.283185307179586 * v)
''',
    "mlc_bits": '''
@triton.jit
def mlc_bits(w0, w1):
    """64 random bits, of two words."""
    return (w1.to(tl.int64) << 32) | w0.to(tl.int64)
''',
    "mlc_rand": """
@triton.jit
def mlc_rand(seed, offset):
    return mlc_uniform(mlc_word(seed, offset))
""",
    "mlc_randn": """
@triton.jit
def mlc_randn(seed, offset):
    w0, w1 = mlc_word_pair(seed, offset)
    return mlc_normal(w0, w1)
""",
    "mlc_randbits": """
@triton.jit
def mlc_randbits(seed, offset):
    w0, w1 = mlc_word_pair(seed, offset)
    return mlc_bits(w0, w1)
""",
    "mlc_rand_tile": """
@triton.jit
def mlc_rand_tile(seed, group, order: tl.constexpr, shape: tl.constexpr):
    return mlc_uniform(mlc_words_tile(seed, group, order, shape))
""",
    "mlc_randn_tile": """
@triton.jit
def mlc_randn_tile(seed, group, order: tl.constexpr, shape: tl.constexpr):
    w0, w1 = mlc_word_pairs_tile(seed, group, order, shape)
    return mlc_normal(w0, w1)
""",
    "mlc_randbits_tile": """
@triton.jit
def mlc_randbits_tile(seed, group, order: tl.constexpr, shape: tl.constexpr):
    w0, w1 = mlc_word_pairs_tile(seed, group, order, shape)
    return mlc_bits(w0, w1)
""",
}
_NAME = re.compile(r"\bmlc_\w+")


def helpers_for(text: str, target: Target) -> str:
    """The sources of the device functions that ``text`` calls, each before its first use, for a target."""
    needed: dict[str, str] = {}
    types = Types.of(target)

    def visit(body: str) -> None:
        for name in _NAME.findall(body):
            source = HELPERS.get(name) or conversion_source(name, target) or approximation_source(name, target)
            source = (
                source or iteration_source(name, types) or intrinsic_source(name, types) or pair_source(name, target)
            )
            if source is not None and name not in needed:
                visit(source.replace(f"def {name}", ""))
                needed[name] = source

    visit(text)
    return "\n".join(s for s in needed.values())
