"""What a processor must have: features of a target by the words in which processors tell of them, and the choice among
variants when a library is opened."""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.target import Target
from ..kernel import EmitError
from .constants import Constants, struct

# Words of x86-64: CPUID's leaves and registers, and what the system saves of the vector registers.
_X86_WORDS = ("1.ecx", "1.edx", "7.ebx", "7.ecx", "7.edx", "7.1.eax", "7.1.edx", "80000001.ecx", "xcr0", "tiles")
_X86_BITS = {
    "1.ecx": {"sse3": 0, "pclmul": 1, "ssse3": 9, "fma": 12, "cx16": 13, "sse4.1": 19, "sse4.2": 20, "movbe": 22,
              "popcnt": 23, "aes": 25, "xsave": 26, "avx": 28, "f16c": 29, "rdrnd": 30},
    "1.edx": {"cx8": 8, "cmov": 15, "mmx": 23, "fxsr": 24, "sse": 25, "sse2": 26},
    "7.ebx": {"fsgsbase": 0, "bmi": 3, "avx2": 5, "bmi2": 8, "avx512f": 16, "avx512dq": 17, "rdseed": 18, "adx": 19,
              "avx512ifma": 21, "clflushopt": 23, "clwb": 24, "avx512cd": 28, "sha": 29, "avx512bw": 30,
              "avx512vl": 31},
    "7.ecx": {"avx512vbmi": 1, "avx512vbmi2": 6, "gfni": 8, "vaes": 9, "vpclmulqdq": 10, "avx512vnni": 11,
              "avx512bitalg": 12, "avx512vpopcntdq": 14},
    "7.edx": {"avx512vp2intersect": 8, "amx-bf16": 22, "avx512fp16": 23, "amx-tile": 24, "amx-int8": 25},
    "7.1.eax": {"avxvnni": 4, "avx512bf16": 5, "amx-fp16": 21, "avxifma": 23},
    "7.1.edx": {"avxvnniint8": 4, "avxneconvert": 5, "avxvnniint16": 10},
    "80000001.ecx": {"sahf": 0, "lzcnt": 5, "sse4a": 6, "prfchw": 8},
}  # fmt: skip
# The system has to be asked for the large registers of these, once a process.
_X86_TILES = frozenset(("amx-tile", "amx-int8", "amx-bf16", "amx-fp16"))
# What the system has to save of the registers that a feature uses.
_SAVED = {"avx512": 0xE6, "amx": 0x60006, "avx": 0x6}
_V2 = ("cx16", "sahf", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_LEVELS: dict[str, tuple[str, ...]] = {
    "x86-64": (), "x86-64-v2": _V2, "x86-64-v3": _V3,
    "x86-64-v4": (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
}  # fmt: skip

# Words of AArch64: what the system tells of the processor (AT_HWCAP and AT_HWCAP2).
_ARM_WORDS = ("hwcap", "hwcap2")
_ARM_BITS = {
    "hwcap": {"aes": 3, "sha2": 6, "crc": 7, "lse": 8, "fullfp16": 10, "rdm": 12, "dotprod": 20, "sve": 22,
              "fp16fml": 23},
    "hwcap2": {"sve2": 1, "i8mm": 13, "bf16": 14},
}  # fmt: skip
_ARM_ALWAYS = frozenset(("neon", "fp-armv8"))


def required(target: Target, machine: str) -> tuple[str, ...]:
    """The features that code for a target uses, of those that a library can ask a processor for."""
    asked = [f[1:] for f in target.features.split(",") if f.startswith("+")]
    bits = _X86_BITS if machine == "x86-64" else _ARM_BITS
    known = {name for word in bits.values() for name in word}
    if machine == "x86-64":
        return tuple(sorted({*_LEVELS.get(target.arch, ()), *(f for f in asked if f in known)}))
    return tuple(sorted({f for f in asked if f in known}))


def compiled_for(target: Target, machine: str) -> tuple[str, str]:
    """LLVM's processor and features for a target: nothing else is used than what ``required`` has.

    Raises: EmitError where the name of a processor is all that is known of it.
    """
    wanted = required(target, machine)
    bits = _X86_BITS if machine == "x86-64" else _ARM_BITS
    known = [name for word in bits.values() for name in word]
    if machine == "x86-64" and target.arch in _LEVELS:
        return target.arch, ",".join(f"+{f}" for f in wanted)
    if machine != "x86-64":
        unknown = sorted({f[1:] for f in target.features.split(",") if f.startswith("+")} - {*known, *_ARM_ALWAYS})
        if unknown:
            raise EmitError(f"a library cannot ask an AArch64 processor for {', '.join(unknown)}; it knows {known}")
        return "generic", ",".join(f"+{f}" for f in wanted)
    if not target.features:
        raise EmitError(
            f"what a library for {target.arch} has to ask its processor for is not known: give the target's features, "
            f"or one of {', '.join(_LEVELS)}"
        )
    return target.arch, ",".join(f"{'+' if f in wanted else '-'}{f}" for f in known)


def requirements(name: str, target: Target, machine: str, constants: Constants) -> tuple[str, int]:
    """A table of what a variant asks for (number of the word, bits, name): the constant, and how many rows."""
    x86 = machine == "x86-64"
    words, bits = (_X86_WORDS, _X86_BITS) if x86 else (_ARM_WORDS, _ARM_BITS)
    rows = []
    wanted = required(target, machine)
    for word, places in bits.items():
        for feature, bit in places.items():
            if feature in wanted:
                rows.append((words.index(word), 1 << bit, feature))
    if x86:
        saved = 0
        for feature in wanted:
            saved |= next((mask for start, mask in _SAVED.items() if feature.startswith(start)), 0)
        if saved:
            rows.append((words.index("xcr0"), saved, "vector registers that the system saves"))
        if _X86_TILES & set(wanted):
            rows.append((words.index("tiles"), 1, "the system's permission to use AMX"))
    items = [
        struct(("i32", word), ("i32", mask if mask < 1 << 31 else mask - (1 << 32)), ("ptr", constants.text(feature)))
        for word, mask, feature in rows
    ]
    return constants.array(name, "%Requirement", items), len(rows)


TYPES = """
; number of a word, bits in it, name of the feature
%Requirement = type { i32, i32, ptr }
; rows of requirements, how many, the addresses of the kernels, name of the processor
%Variant = type { ptr, i64, ptr, ptr }
"""


def processor_text(machine: str, variants: Sequence[Sequence[str]]) -> str:
    """``@processor_words``, and ``@lacks``: what of a variant's requirements this processor lacks.

    ``variants`` are the features that each asks for.
    """
    if machine != "x86-64":
        return _LACKS + _HWCAP
    asks = any(feature in _X86_TILES for features in variants for feature in features)
    return _LACKS + _CPUID + (_ASK_FOR_TILES if asks else _NO_TILES)


_LACKS = """
; The name of the first feature that the words lack; null where they have all.
define internal ptr @lacks(ptr %words, ptr %variant) {
entry:
  %rows = load ptr, ptr %variant
  %count.at = getelementptr inbounds %Variant, ptr %variant, i32 0, i32 1
  %count = load i64, ptr %count.at
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %has ]
  %more = icmp ult i64 %k, %count
  br i1 %more, label %look, label %all
look:
  %row = getelementptr inbounds %Requirement, ptr %rows, i64 %k
  %word = load i32, ptr %row
  %bits.at = getelementptr inbounds %Requirement, ptr %row, i32 0, i32 1
  %bits = load i32, ptr %bits.at
  %at = getelementptr inbounds i32, ptr %words, i32 %word
  %here = load i32, ptr %at
  %both = and i32 %here, %bits
  %k.next = add i64 %k, 1
  %fine = icmp eq i32 %both, %bits
  br i1 %fine, label %has, label %lacking
has:
  br label %each
lacking:
  %name.at = getelementptr inbounds %Requirement, ptr %row, i32 0, i32 2
  %name = load ptr, ptr %name.at
  ret ptr %name
all:
  ret ptr null
}
"""

_CPUID = """
define internal { i32, i32, i32, i32 } @cpuid(i32 %leaf, i32 %part) {
  %r = call { i32, i32, i32, i32 } asm sideeffect "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx}"(i32 %leaf, i32 %part)
  ret { i32, i32, i32, i32 } %r
}

; Ten words that tell what this processor has; "words" is zero.
define internal void @processor_words(ptr %words) {
entry:
  %l0 = call { i32, i32, i32, i32 } @cpuid(i32 0, i32 0)
  %most = extractvalue { i32, i32, i32, i32 } %l0, 0
  %l1 = call { i32, i32, i32, i32 } @cpuid(i32 1, i32 0)
  %w0 = extractvalue { i32, i32, i32, i32 } %l1, 2
  store i32 %w0, ptr %words
  %w1 = extractvalue { i32, i32, i32, i32 } %l1, 3
  %w1.at = getelementptr inbounds i32, ptr %words, i32 1
  store i32 %w1, ptr %w1.at
  %new = icmp uge i32 %most, 7
  br i1 %new, label %seven, label %extended
seven:
  %l7 = call { i32, i32, i32, i32 } @cpuid(i32 7, i32 0)
  %w2 = extractvalue { i32, i32, i32, i32 } %l7, 1
  %w2.at = getelementptr inbounds i32, ptr %words, i32 2
  store i32 %w2, ptr %w2.at
  %w3 = extractvalue { i32, i32, i32, i32 } %l7, 2
  %w3.at = getelementptr inbounds i32, ptr %words, i32 3
  store i32 %w3, ptr %w3.at
  %w4 = extractvalue { i32, i32, i32, i32 } %l7, 3
  %w4.at = getelementptr inbounds i32, ptr %words, i32 4
  store i32 %w4, ptr %w4.at
  %parts = extractvalue { i32, i32, i32, i32 } %l7, 0
  %two = icmp uge i32 %parts, 1
  br i1 %two, label %second, label %extended
second:
  %l71 = call { i32, i32, i32, i32 } @cpuid(i32 7, i32 1)
  %w5 = extractvalue { i32, i32, i32, i32 } %l71, 0
  %w5.at = getelementptr inbounds i32, ptr %words, i32 5
  store i32 %w5, ptr %w5.at
  %w6 = extractvalue { i32, i32, i32, i32 } %l71, 3
  %w6.at = getelementptr inbounds i32, ptr %words, i32 6
  store i32 %w6, ptr %w6.at
  br label %extended
extended:
  %e0 = call { i32, i32, i32, i32 } @cpuid(i32 -2147483648, i32 0)
  %e.most = extractvalue { i32, i32, i32, i32 } %e0, 0
  %e.some = icmp uge i32 %e.most, -2147483647
  br i1 %e.some, label %first, label %system
first:
  %e1 = call { i32, i32, i32, i32 } @cpuid(i32 -2147483647, i32 0)
  %w7 = extractvalue { i32, i32, i32, i32 } %e1, 2
  %w7.at = getelementptr inbounds i32, ptr %words, i32 7
  store i32 %w7, ptr %w7.at
  br label %system
system:
  ; Whether the system lets programs ask what it saves.
  %osxsave = and i32 %w0, 134217728
  %asks = icmp ne i32 %osxsave, 0
  br i1 %asks, label %saved, label %done
saved:
  %x = call { i32, i32 } asm sideeffect "xgetbv", "={ax},={dx},{cx}"(i32 0)
  %w8 = extractvalue { i32, i32 } %x, 0
  %w8.at = getelementptr inbounds i32, ptr %words, i32 8
  store i32 %w8, ptr %w8.at
  %w9 = call i32 @tiles(ptr %words)
  %w9.at = getelementptr inbounds i32, ptr %words, i32 9
  store i32 %w9, ptr %w9.at
  br label %done
done:
  ret void
}
"""

_NO_TILES = """
define internal i32 @tiles(ptr %words) {
  ret i32 0
}
"""

_ASK_FOR_TILES = """
; Ask the system for the registers of AMX, where the processor has them: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA).
define internal i32 @tiles(ptr %words) {
  %w4.at = getelementptr inbounds i32, ptr %words, i32 4
  %w4 = load i32, ptr %w4.at
  %bit = and i32 %w4, 16777216
  %none = icmp eq i32 %bit, 0
  br i1 %none, label %no, label %ask
no:
  ret i32 0
ask:
  %status = call i64 (i64, ...) @syscall(i64 158, i64 4131, i64 18)
  %granted = icmp eq i64 %status, 0
  %word = zext i1 %granted to i32
  ret i32 %word
}
"""

_HWCAP = """
declare i64 @getauxval(i64)

; Two words that tell what this processor has.
define internal void @processor_words(ptr %words) {
  %h = call i64 @getauxval(i64 16)
  %w0 = trunc i64 %h to i32
  store i32 %w0, ptr %words
  %h2 = call i64 @getauxval(i64 26)
  %w1 = trunc i64 %h2 to i32
  %w1.at = getelementptr inbounds i32, ptr %words, i32 1
  store i32 %w1, ptr %w1.at
  ret void
}
"""


def choice_text(count: int) -> str:
    """``@choose`` among so many variants: the first that this processor has all for; the last one is the least."""
    return f"""
; Choose the kernels of this processor. The name of what it lacks of the least variant, or null.
define internal ptr @choose() {{
entry:
  %words = alloca [16 x i32], align 16
  call void @llvm.memset.p0.i64(ptr %words, i8 0, i64 64, i1 false)
  call void @processor_words(ptr %words)
  br label %each
each:
  %k = phi i64 [ 0, %entry ], [ %k.next, %not ]
  %variant = getelementptr inbounds %Variant, ptr @variants, i64 %k
  %lack = call ptr @lacks(ptr %words, ptr %variant)
  %none = icmp eq ptr %lack, null
  br i1 %none, label %found, label %not
not:
  %k.next = add i64 %k, 1
  %more = icmp ult i64 %k.next, {count}
  br i1 %more, label %each, label %refuse
refuse:
  ret ptr %lack
found:
  %kernels.at = getelementptr inbounds %Variant, ptr %variant, i32 0, i32 2
  %kernels = load ptr, ptr %kernels.at
  store atomic ptr %kernels, ptr @kernels monotonic, align 8
  store atomic i64 %k, ptr @chosen monotonic, align 8
  ret ptr null
}}
"""
