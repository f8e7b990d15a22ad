"""Objects of LLVM's as shared objects: what is called, what is refused, and what readelf says of them."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.codegen.elf.modules import emitted, loaded, objects
from torch_mlc.codegen.elf.format import ElfError
from torch_mlc.codegen.elf.link import link_shared
from torch_mlc.codegen.elf.merge import merge_objects
from torch_mlc.codegen.elf.read import read_object, renamed
from torch_mlc.runtime.cpu import load_object

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared objects of ELF are Linux's")
LIBRARIES = ("libc.so.6", "libm.so.6")

ALL_KINDS = """
@counter = internal global i64 40, align 8
@zeros = internal global [100 x i64] zeroinitializer
@table = internal constant [3 x ptr] [ptr @first, ptr @second, ptr @third]
@moved = internal global ptr getelementptr (i8, ptr @text, i64 2)
@text = internal constant [6 x i8] c"hello\\00"
@numbers = internal constant [4 x float] [float 1.0, float 2.0, float 4.0, float 8.0]
@elsewhere = external global i64
declare double @pow(double, double)
declare i64 @strlen(ptr)
declare i64 @second(i64)
define i64 @first(i64 %x) {
  %old = load i64, ptr @counter
  %new = add i64 %old, %x
  store i64 %new, ptr @counter
  ret i64 %new
}
define hidden i64 @third(i64 %x) {
  %at = getelementptr i64, ptr @zeros, i64 %x
  %old = load i64, ptr %at
  %new = add i64 %old, 1
  store i64 %new, ptr %at
  ret i64 %new
}
define i64 @by_table(i64 %k, i64 %x) {
  %at = getelementptr ptr, ptr @table, i64 %k
  %f = load ptr, ptr %at
  %r = call i64 %f(i64 %x)
  ret i64 %r
}
define double @power(double %x) {
  %r = call double @pow(double %x, double 3.0)
  ret double %r
}
define i64 @length() {
  %p = load ptr, ptr @moved
  %r = call i64 @strlen(ptr %p)
  ret i64 %r
}
define ptr @function_of_mathematics() {
  ret ptr @pow
}
define i64 @shared() {
  %r = load i64, ptr @elsewhere
  ret i64 %r
}
define i64 @jump(i64 %k) {
  switch i64 %k, label %other [ i64 0, label %a
    i64 1, label %b
    i64 2, label %c
    i64 3, label %d
    i64 4, label %e ]
a:
  ret i64 10
b:
  %x = call i64 @first(i64 0)
  ret i64 %x
c:
  ret i64 33
d:
  %y = call i64 @third(i64 99)
  ret i64 %y
e:
  ret i64 -5
other:
  ret i64 1
}
define float @scaled(<4 x float> %x) {
  %y = fmul <4 x float> %x, <float 1.0, float 10.0, float 100.0, float 1000.0>
  %a = extractelement <4 x float> %y, i64 3
  %n = load float, ptr getelementptr (float, ptr @numbers, i64 3)
  %r = fadd float %a, %n
  ret float %r
}
"""
OTHER = """
@elsewhere = global i64 77
define i64 @second(i64 %x) {
  %r = mul i64 %x, 3
  ret i64 %r
}
"""
NAMES = ("first", "second", "by_table", "power", "length", "function_of_mathematics", "shared", "jump", "scaled")


def linked(*texts: str, exported: tuple[str, ...] = ("f",), imports: tuple[str, ...] = (), **options: str) -> bytes:
    return link_shared(objects(texts, **options), exported, imports, LIBRARIES)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def all_kinds() -> bytes:
    return linked(ALL_KINDS, OTHER, exported=NAMES, imports=("pow", "strlen"))


def test_code_and_data_of_two_objects(all_kinds: bytes, tmp_path: Path) -> None:
    found = loaded(all_kinds, tmp_path)
    for name in NAMES:
        getattr(found, name).restype = ctypes.c_int64
    assert found.first(2) == 42 and found.first(1) == 43
    assert found.by_table(ctypes.c_int64(1), ctypes.c_int64(5)) == 15
    assert [found.by_table(ctypes.c_int64(2), ctypes.c_int64(9)) for _ in range(3)] == [1, 2, 3]
    assert [found.jump(ctypes.c_int64(k)) for k in range(6)] == [10, 43, 33, 1, -5, 1]
    assert found.length() == 3 and found.shared() == 77
    found.power.restype, found.power.argtypes = ctypes.c_double, (ctypes.c_double,)
    assert found.power(2.0) == 8.0
    address = found.function_of_mathematics
    address.restype = ctypes.c_void_p
    power = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_double, ctypes.c_double)(address())
    assert power(3.0, 2.0) == 9.0
    with pytest.raises(AttributeError):
        found.third  # noqa: B018


def test_each_load_has_data_of_its_own(all_kinds: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one, other = loaded(all_kinds, tmp_path), loaded(all_kinds, tmp_path / "a")
    assert one.first(1) == 41 and one.first(1) == 42 and other.first(1) == 41


def test_memory_of_threads(tmp_path: Path) -> None:
    text = """
@mine = internal thread_local global i64 5
@zero = internal thread_local global [50 x i64] zeroinitializer
@seen = thread_local global i64 9
define i64 @f(i64 %x) {
  %old = load i64, ptr @mine
  %new = add i64 %old, %x
  store i64 %new, ptr @mine
  %at = getelementptr i64, ptr @zero, i64 49
  %z = load i64, ptr %at
  store i64 %x, ptr %at
  %s = load i64, ptr @seen
  %a = add i64 %new, %z
  %b = add i64 %a, %s
  ret i64 %b
}
"""
    found = loaded(linked(text, imports=("__tls_get_addr",)), tmp_path)
    found.f.restype = ctypes.c_int64
    results: list[list[int]] = []

    def work() -> None:
        results.append([found.f(ctypes.c_int64(k)) for k in (1, 10, 100)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == [[15, 26, 135]] * 4


def test_equal_objects_give_equal_bytes(all_kinds: bytes) -> None:
    again = linked(ALL_KINDS, OTHER, exported=NAMES, imports=("pow", "strlen"))
    assert again == all_kinds
    assert linked(ALL_KINDS.replace("i64 40", "i64 41"), OTHER, exported=NAMES, imports=("pow", "strlen")) != all_kinds


# --- random programs --------------------------------------------------------------------------------------------------


def random_modules(seed: int) -> list[str]:
    """Modules whose functions call each other, over globals and tables that they share."""
    rng = random.Random(seed)
    count, modules = rng.randint(3, 14), rng.randint(1, 5)
    home = [rng.randrange(modules) for _ in range(count)]
    hidden = [rng.random() < 0.4 for _ in range(count - 1)] + [False]
    texts: list[str] = []
    for m in range(modules):
        lines, declared = [], set()
        for g in range(3):
            kind = rng.choice(("internal global i64 7", "internal global i64 0", "internal constant i64 11"))
            lines.append(f"@g{g} = {kind}")
        if m == 0:
            lines.append("@both = global [4 x i64] [i64 1, i64 2, i64 3, i64 4]")
        else:
            lines.append("@both = external global [4 x i64]")
        for f in (k for k in range(count) if home[k] == m):
            below = list(range(f))
            body, value = ["  %v0 = add i64 %x, 1"], "%v0"
            for step in range(1, rng.randint(3, 9)):
                new = f"%v{step}"
                how = rng.choice(("call", "both", "own", "table", "switch", "mul"))
                if how == "call" and below:
                    other = rng.choice(below)
                    body.append(f"  {new} = call i64 @f{other}(i64 {value})")
                    declared.add(other)
                elif how == "both":
                    k = rng.randrange(4)
                    body.append(f"  %p{step} = getelementptr i64, ptr @both, i64 {k}")
                    body.append(f"  %o{step} = load i64, ptr %p{step}")
                    body.append(f"  {new} = add i64 %o{step}, {value}")
                    body.append(f"  store i64 {new}, ptr %p{step}")
                elif how == "own":
                    body.append(f"  %o{step} = load i64, ptr @g{rng.randrange(3)}")
                    body.append(f"  {new} = xor i64 %o{step}, {value}")
                elif how == "table" and below:
                    chosen = [rng.choice(below) for _ in range(4)]
                    declared.update(chosen)
                    name = f"@t{f}.{step}"
                    lines.append(f"{name} = internal constant [4 x ptr] [{', '.join(f'ptr @f{c}' for c in chosen)}]")
                    body.append(f"  %k{step} = and i64 {value}, 3")
                    body.append(f"  %p{step} = getelementptr ptr, ptr {name}, i64 %k{step}")
                    body.append(f"  %q{step} = load ptr, ptr %p{step}")
                    body.append(f"  {new} = call i64 %q{step}(i64 {value})")
                elif how == "switch":
                    cases = " ".join(f"i64 {k}, label %l{step}.{k}" for k in range(6))
                    body.append(f"  %k{step} = and i64 {value}, 7")
                    body.append(f"  switch i64 %k{step}, label %l{step}.6 [ {cases} ]")
                    for k in range(7):
                        body.append(f"l{step}.{k}:")
                        body.append(f"  %c{step}.{k} = mul i64 {value}, {rng.randint(-9, 9)}")
                        body.append(f"  br label %m{step}")
                    body.append(f"m{step}:")
                    body.append(f"  {new} = phi i64 " + ", ".join(f"[ %c{step}.{k}, %l{step}.{k} ]" for k in range(7)))
                else:
                    body.append(f"  {new} = mul i64 {value}, {rng.randint(2, 99)}")
                value = new
            seen = "hidden " if hidden[f] else ""
            lines.append("\n".join([f"define {seen}i64 @f{f}(i64 %x) {{", *body, f"  ret i64 {value}", "}"]))
        lines += [f"declare i64 @f{d}(i64)" for d in sorted(declared) if home[d] != m]
        texts.append("\n".join(lines) + "\n")
    return [t for t in texts if t]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("level", [0, 2])
def test_random_programs_compute_what_the_jit_computes(seed: int, level: int, tmp_path: Path) -> None:
    texts = random_modules(seed)
    last = max(int(n) for n in re.findall(r"define (?:hidden )?i64 @f(\d+)", "".join(texts)))
    parts = objects(texts, level=level)
    found = loaded(link_shared(parts, [f"f{last}"], (), LIBRARIES), tmp_path)
    # The merged object is a program of the linker that the JIT has.
    whole = load_object(merge_objects(parts, [f"f{last}"], ()), [f"f{last}"])
    wanted = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(whole.addresses[f"f{last}"])
    function = getattr(found, f"f{last}")
    function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64,)
    rng = random.Random(seed)
    for _ in range(20):
        x = rng.randint(-(1 << 40), 1 << 40)
        assert function(x) == wanted(x)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "options", "told"),
    [
        (
            ["declare void @sgemm_()\ndefine void @f() {\n  call void @sgemm_()\n  ret void\n}"],
            {},
            r"sgemm_ \(used by module 0\)",
        ),
        (["define void @f() {\n  ret void\n}"] * 2, {}, "both module 0 and module 1 define f"),
        (["define void @g() {\n  ret void\n}"], {}, "no object defines what the library is to export: f"),
        (
            [
                "@t = internal global [9 x i64] zeroinitializer\ndefine i64 @f(i64 %x) {\n"
                "  %p = getelementptr i64, ptr @t, i64 %x\n  %r = load i64, ptr %p\n  ret i64 %r\n}"
            ],
            {"reloc": "static"},
            r"module 0, \.text\+0x\w+, .*R_X86_64_32S.*reloc=pic",
        ),
        (
            [
                "@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }] [{ i32, ptr, ptr } "
                "{ i32 1, ptr @f, ptr null }]\ndefine void @f() {\n  ret void\n}"
            ],
            {},
            r"module 0 has the section \.(ctors|init_array).*: nothing of a library runs when it is loaded",
        ),
    ],
)
def test_refusals_name_symbol_relocation_and_object(texts: list[str], options: dict[str, str], told: str) -> None:
    with pytest.raises(ElfError, match=told):
        linked(*texts, **options)


def test_what_is_no_object_is_refused(all_kinds: bytes) -> None:
    for data, told in (
        (b"", "no 64-bit little-endian ELF"),
        (b"MZ" * 100, "no 64-bit little-endian ELF"),
        (all_kinds, "no relocatable object"),
    ):
        with pytest.raises(ElfError, match=told):
            read_object(data, "it")
    both = objects([OTHER]) + objects([OTHER], "aarch64")
    with pytest.raises(ElfError, match="objects of 2 machines"):
        link_shared(both, ["second"], (), LIBRARIES)


def test_a_name_is_given_to_what_an_object_defines(tmp_path: Path) -> None:
    text = "define internal i64 @inner(i64 %x) {\n  ret i64 9\n}\ndefine i64 @f() {\n  ret i64 4\n}"
    given = read_object(emitted(text), "it")
    found = loaded(link_shared([renamed(given, {"inner": "outer", "f": "g"})], ["outer", "g"], (), LIBRARIES), tmp_path)
    assert (found.outer(0), found.g()) == (9, 4)
    with pytest.raises(ElfError, match="it defines nowhere 0 times"):
        renamed(given, {"nowhere": "x"})


def test_the_first_definition_that_is_not_weak_counts(tmp_path: Path) -> None:
    weak = "define weak i64 @g() {\n  ret i64 1\n}\ndefine i64 @f() {\n  %r = call i64 @g()\n  ret i64 %r\n}"
    strong = "define i64 @g() {\n  ret i64 2\n}"
    assert loaded(linked(weak, strong), tmp_path).f() == 2
    assert loaded(linked(weak), tmp_path).f() == 1
    # Copies that C++ would make in each object: one of them is taken.
    copy = "$g = comdat any\ndefine linkonce_odr i64 @g() comdat {\n  ret i64 5\n}\n"
    use = "define i64 @NAME() {\n  %r = call i64 @g()\n  ret i64 %r\n}\n"
    both = linked(copy + use.replace("NAME", "f"), copy + use.replace("NAME", "h"), exported=("f", "h"))
    assert loaded(both, tmp_path).f() == loaded(both, tmp_path).h() == 5


# --- what other tools say ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf to read the library with")
def test_readelf_finds_all_in_order(all_kinds: bytes, tmp_path: Path) -> None:
    path = tmp_path / "it.so"
    path.write_bytes(all_kinds)
    done = subprocess.run(["readelf", "-Wa", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not re.search("warning|error", done.stderr + done.stdout, re.IGNORECASE)
    text = done.stdout
    assert re.search(r"GNU_STACK.* RW +0x", text) and "GNU_RELRO" in text and "TEXTREL" not in text
    assert re.search(r"Flags: NOW", text) and re.search(r"Build ID: [0-9a-f]{40}", text)
    assert re.findall(r"Shared library: \[(.*)\]", text) == list(LIBRARIES)
    assert not re.search(r"LOAD.*RWE", text)
    dynamic = text[text.index("'.dynsym' contains") : text.index("'.symtab' contains")]
    seen = {w.split()[-1] for w in dynamic.splitlines() if re.match(r" +[1-9]\d*:", w)}
    assert seen == {*NAMES, "pow", "strlen"}
    undefined = {w.split()[-1] for w in dynamic.splitlines() if " UND " in w and w.split()[-1] != "UND"}
    assert undefined == {"pow", "strlen"}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to link the merged object with")
def test_merged_objects_go_into_a_program(tmp_path: Path) -> None:
    """Two merged objects with the same hidden names make one program."""
    for k in (1, 2):
        inner = f"define hidden i64 @inner() {{\n  ret i64 {k}\n}}"
        outer = f"declare hidden i64 @inner()\ndefine i64 @f{k}() {{\n  %r = call i64 @inner()\n  ret i64 %r\n}}"
        parts = objects([outer, inner])
        (tmp_path / f"{k}.o").write_bytes(merge_objects(parts, [f"f{k}"], ()))
        assert merge_objects(parts, [f"f{k}"], ()) == (tmp_path / f"{k}.o").read_bytes()
    (tmp_path / "main.c").write_text("long f1(void), f2(void); int main(void) { return 10 * f1() + f2(); }")
    subprocess.run(["gcc", "main.c", "1.o", "2.o", "-o", "main"], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "main"]).returncode == 12
