"""Libraries called from Python: numbers, state, threads, processes, and variants for processors."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sympy

from tests.runtime.export.models import ARM, V3, V4, expected, sample, spec, written
from torch_mlc.codegen.elf.format import ElfError
from torch_mlc.codegen.export.library import ExportedFunction, ExportedModel, KernelVariant
from torch_mlc.codegen.kernel import EmitError, KernelSource
from torch_mlc.ir.expr.dtypes import DType
from torch_mlc.ir.target import Target
from torch_mlc.runtime.export import open as opened
from torch_mlc.runtime.export.open import LibraryError, ModelLibrary
from torch_mlc.runtime.export.write import write_library

Folder = tuple[Path, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("sample")
    return path, dict(written(path, variants=(V4,)))


def arrays(rows: int, taken: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 64)).astype(np.float32), rng.integers(0, 10, taken)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_numbers(folder: Folder, threads: int) -> None:
    path, weights = folder
    with ModelLibrary(path, threads) as model:
        for rows, taken in ((1, 0), (2, 1), (33, 7), (256, 100), (2048, 3)):
            x, index = arrays(rows, taken)
            y, taken_rows, _ = model.call("forward", x, index)
            wanted = expected(weights, x, index)
            np.testing.assert_allclose(y, wanted[0], rtol=1e-6)
            np.testing.assert_array_equal(taken_rows, wanted[1])
        for count in (0, 1, 1000):
            (two,) = model.call("twice", np.arange(count, dtype=np.float32))
            np.testing.assert_array_equal(two, np.tile(np.arange(count), 2))


def test_calls_with_arrays_of_kinds_that_a_context_knows(folder: Folder) -> None:
    rng = np.random.default_rng(1)
    with ModelLibrary(folder[0]) as model:
        context = model.context()
        kept = []
        for _ in range(300):
            # More kinds than a context remembers, each again with other arrays.
            x = rng.normal(size=int(rng.integers(0, 90))).astype(np.float32)
            (two,) = context.call("twice", x)
            kept.append((x, two))
        for x, two in kept:  # none was written over by a later call
            np.testing.assert_array_equal(two, np.tile(x, 2))
        x = np.ones(5, np.float32)
        out = np.zeros(10, np.float32)
        assert context.call("twice", x, out=[out])[0] is out and out.all()
        with pytest.raises(LibraryError, match="gives 1 arrays"):
            context.call("twice", x, out=[])
        with pytest.raises(LibraryError, match="float32"):
            context.call("twice", x.astype(np.float64))
        with pytest.raises(LibraryError, match="stride of dimension 0 of input 0"):
            context.call("twice", np.ones(10, np.float32)[::2])


def test_a_context_does_not_keep_arrays(folder: Folder) -> None:
    with ModelLibrary(folder[0]) as model:
        x = np.ones(1000, np.float32)
        result = model.call("twice", x)[0]
        watched = [weakref.ref(x), weakref.ref(result)]
        del x, result
        gc.collect()
        assert [w() for w in watched] == [None, None]


def test_state_is_each_contexts_own(folder: Folder) -> None:
    model = ModelLibrary(folder[0])
    x, index = arrays(3, 1)
    one, other = model.context(), model.context()
    assert [int(one.call("forward", x, index)[2]) for _ in range(3)] == [1, 2, 3]
    assert [int(other.call("forward", x, index)[2]) for _ in range(2)] == [1, 2]
    assert int(one.call("forward", x, index)[2]) == 4
    assert int(ModelLibrary(folder[0]).call("forward", x, index)[2]) == 1


def test_eight_threads_with_a_context_each(folder: Folder) -> None:
    path, weights = folder
    model = ModelLibrary(path, 3)
    failed: list[str] = []

    def work(seed: int) -> None:
        for k in range(1, 60):
            x, index = arrays(1 + (seed * 31 + k) % 99 if (seed * 31 + k) % 99 != 6 else 8, k % 5, seed)
            y, rows, calls = model.call("forward", x, index)
            wanted = expected(weights, x, index)
            if not np.allclose(y, wanted[0], rtol=1e-6) or not np.array_equal(rows, wanted[1]) or calls != k:
                failed.append(f"thread {seed}, call {k}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failed


def test_one_context_is_for_one_call_at_a_time(folder: Folder) -> None:
    """While a call runs (a host's loop is in it), the same context refuses another, with a sentence of the thread."""
    path, _ = folder
    found = ctypes.CDLL(str(path / "model.so"))
    found.sample_error.restype, found.sample_error.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    model, context = ctypes.c_void_p(), ctypes.c_void_p()
    x, index = arrays(4, 1)
    function = opened.ModelLibrary(path).functions["forward"]
    given = opened._tensors([opened._described(a, s) for a, s in zip((x, index), function.inputs, strict=True)])
    results = [np.empty((4, 64), np.float32), np.empty((1, 64), np.float32), np.empty((), np.int64)]
    out = opened._tensors([opened._described(a, s) for a, s in zip(results, function.results, strict=True)])
    codes: list[tuple[int, bytes]] = []
    member_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
    parallel_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, member_type, ctypes.c_void_p)

    def parallel(host: int, count: int, member: object, task: int) -> None:
        codes.append((found.sample_call(context, 0, given, out), found.sample_error(None)))
        for k in range(count):
            member(task, k)  # type: ignore[operator]

    kept = parallel_type(parallel)
    options = opened._Options(ctypes.sizeof(opened._Options), 2, ctypes.cast(kept, ctypes.c_void_p), None)
    assert found.sample_open(str(path).encode(), ctypes.byref(options), ctypes.byref(model)) == 0
    assert found.sample_context(model, ctypes.byref(context)) == 0
    assert found.sample_call(context, 0, given, out) == 0
    assert codes and all(c == 1 and b"in another call" in text for c, text in codes)
    found.sample_close_context(context)
    found.sample_close(model)


def test_calls_after_a_fork(folder: Folder) -> None:
    path, weights = folder
    model = ModelLibrary(path, 4)
    x, index = arrays(64, 2)
    model.call("forward", x, index)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            y, _, calls = model.call("forward", x, index)
            os._exit(not (np.allclose(y, expected(weights, x, index)[0], rtol=1e-6) and calls == 2))
        assert os.waitpid(child, 0)[1] == 0


def test_a_library_needs_no_torch(folder: Folder, tmp_path: Path) -> None:
    """One file and NumPy: no torch, nothing of this project, no current folder."""
    shutil.copy(Path(opened.__file__), tmp_path / "runner.py")
    code = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1]); from runner import ModelLibrary\n"
        "m = ModelLibrary(sys.argv[2]); y, = m.call('twice', np.ones(3, np.float32))\n"
        "print(y.sum(), m.functions.keys())\n"
        "assert not [k for k in sys.modules if k.startswith(('torch', 'llvmlite', 'sympy'))]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(folder[0])], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0 and done.stdout.startswith("6.0 dict_keys(['forward', 'twice'])"), done.stderr


def test_the_module_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys, torch_mlc.runtime.export.open; assert 'torch' not in sys.modules"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr


def test_a_library_asks_for_nothing_but_the_c_library(folder: Folder) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("there is no readelf to read the library with")
    text = subprocess.run(["readelf", "-Wd", "--dyn-syms", str(folder[0] / "model.so")], capture_output=True, text=True)
    assert re.findall(r"Shared library: \[(.*)\]", text.stdout) == ["libc.so.6", "libm.so.6", "libpthread.so.0"]
    shown = {w.split()[-1] for w in text.stdout.splitlines() if re.match(r" +[1-9]\d*:", w) and " UND " not in w}
    ends = ("open", "context", "shapes", "call", "error", "signature", "close_context", "close")
    assert shown == {f"sample_{e}" for e in ends}


def test_what_the_library_says_of_itself(folder: Folder) -> None:
    model = ModelLibrary(folder[0])
    assert model.name == "sample" and model.signature["processors"] == ["x86-64-v4", "x86-64-v3"]
    forward = model.functions["forward"]
    assert [(t.name, t.dtype, t.shape) for t in forward.inputs] == [
        ("x", "float32", ("s0", 64)),
        ("index", "int64", ("s1",)),
    ]
    assert forward.sizes["s0"] == {"input": 0, "dimension": 0, "least": 1, "most": 2048}
    assert forward.rules == ("s0 (dimension 0 of x) may not be 7",)
    x, index = arrays(5, 2)
    assert model.shapes("forward", x, index) == [((5, 64), (64, 1)), ((2, 64), (64, 1)), ((), ())]


# --- artifacts --------------------------------------------------------------------------------------------------------


def test_equal_models_give_equal_bytes(folder: Folder, tmp_path: Path) -> None:
    written(tmp_path, variants=(V4,))
    names = ("model.so", "model.o", "model.h", "model.safetensors", "kernels/scale.ll")
    for name in names:
        assert (tmp_path / name).read_bytes() == (folder[0] / name).read_bytes(), name


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda d: d[:-1], r"has \d+ bytes, and this library was made for a file of \d+"),
        (lambda d: d + b"\0", r"has \d+ bytes, and this library"),
        (lambda d: b"", r"has 0 bytes"),
        (lambda d: d[:3], r"has 3 bytes"),
        (lambda d: d.replace(b'"odd"', b'"old"'), "the header of .*model.safetensors is not the one"),
        (lambda d: b"\xff" * 8 + d[8:], "the header of .*model.safetensors is not the one"),
        (None, "cannot open .*model.safetensors: No such file"),
    ],
)
def test_weights_that_are_not_the_librarys_are_refused(
    folder: Folder, tmp_path: Path, damage: object, told: str
) -> None:
    shutil.copy(folder[0] / "model.so", tmp_path)
    if callable(damage):
        (tmp_path / "model.safetensors").write_bytes(damage((folder[0] / "model.safetensors").read_bytes()))
    with pytest.raises(LibraryError, match=told) as caught:
        ModelLibrary(tmp_path)
    assert caught.value.kind == "file"


def test_other_weights_with_an_equal_header_are_taken(folder: Folder, tmp_path: Path) -> None:
    """A checkpoint of the same shapes may be put in the place of the one that a library was made with."""
    weights = written(tmp_path, factor=2.0, variants=(V4,))
    shutil.copy(folder[0] / "model.so", tmp_path / "model.so")
    x, index = arrays(4, 1)
    y = ModelLibrary(tmp_path).call("forward", x, index)[0]
    np.testing.assert_allclose(y, expected(weights, x, index)[0], rtol=1e-6)


def test_a_model_that_is_open_outlives_its_files(tmp_path: Path) -> None:
    """A folder is written anew while a process uses it; what that has mapped stays as it is."""
    weights = written(tmp_path)
    model = ModelLibrary(tmp_path, 2)
    x, index = arrays(300, 1)
    before = model.call("forward", x, index)[0]
    others = written(tmp_path, factor=5.0, name="renamed")
    np.testing.assert_array_equal(model.call("forward", x, index)[0], before)
    np.testing.assert_allclose(before, expected(weights, x, index)[0], rtol=1e-6)
    assert others is not weights and not list(tmp_path.glob(".*"))
    assert {p.name for p in (tmp_path / "kernels").iterdir()} == {"scale.ll", "take.ll", "count.ll", "copy.ll"}


def test_folders_without_a_library_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"cannot open .*model\.so"):
        ModelLibrary(tmp_path)
    (tmp_path / "model.so").write_bytes(b"nothing")
    with pytest.raises(LibraryError, match="is no library of a model"):
        ModelLibrary(tmp_path)


def test_libraries_that_are_damaged_are_refused(folder: Folder, tmp_path: Path) -> None:
    """Cut short at any place, or with any byte another: the loader never sees it."""
    data = (folder[0] / "model.so").read_bytes()
    shutil.copy(folder[0] / "model.safetensors", tmp_path)
    rng = random.Random(0)
    for k in range(200):
        at = rng.randrange(len(data))
        other = bytes([data[at] ^ rng.randint(1, 255)])
        (tmp_path / "model.so").write_bytes(data[:at] if k % 2 else data[:at] + other + data[at + 1 :])
        with pytest.raises(LibraryError, match=r"is damaged|is no library of a model") as caught:
            ModelLibrary(tmp_path)
        assert caught.value.kind == "file"


# --- processors -------------------------------------------------------------------------------------------------------


def flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    return set(re.findall(r"\w+", text[text.index("flags") :].split("\n")[0]))


def test_the_kernels_of_this_processor_are_chosen(tmp_path: Path) -> None:
    """A kernel of each variant tells which it is."""
    model, weights = sample()
    tell = """
define void @count(ptr %arguments) {
  %at = getelementptr i64, ptr %arguments, i64 1
  %result = load ptr, ptr %at
  store i64 NUMBER, ptr %result
  ret void
}
"""

    def of(kernels: tuple[KernelSource, ...], number: int) -> tuple[KernelSource, ...]:
        text = tell.replace("NUMBER", str(number))
        return tuple(replace(k, text=text) if k.name == "count" else k for k in kernels)

    amx = Target("cpu", "x86-64-v4", 4, vector_bytes=64, features="+amx-tile,+amx-int8,+avx512fp16")
    variants = sample(variants=(amx, V4))[0].variants
    told = replace(
        model,
        kernels=of(model.kernels, 2),
        variants=tuple(replace(v, kernels=of(v.kernels, k)) for k, v in enumerate(variants)),
    )
    write_library(told, weights, tmp_path)
    x, index = arrays(1, 0)
    has = flags()
    if not {"avx2", "fma", "bmi2", "f16c"} <= has:
        with pytest.raises(LibraryError, match=r"this processor lacks .*; the library needs at least x86-64-v3"):
            ModelLibrary(tmp_path)
        return
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= has
    wanted = 0 if v4 and {"amx_tile", "amx_int8", "avx512_fp16"} <= has else 1 if v4 else 2
    assert int(ModelLibrary(tmp_path).call("forward", x, index)[2]) == wanted


def test_a_processor_that_lacks_something_is_refused_by_name(tmp_path: Path) -> None:
    if "sse4a" in flags() and "avx512_vp2intersect" in flags() and "amx_fp16" in flags():
        pytest.skip("this processor has instructions of two makers that none is known to have together")
    all_of_both = Target("cpu", "x86-64-v3", 4, vector_bytes=32, features="+sse4a,+avx512vp2intersect,+amx-fp16")
    written(tmp_path, target=all_of_both)
    lacks = r"this processor lacks (sse4a|avx512vp2intersect|amx-fp16|vector registers.*); .* at least x86-64-v3"
    with pytest.raises(LibraryError, match=lacks) as caught:
        ModelLibrary(tmp_path)
    assert caught.value.kind == "processor"


def test_the_variant_of_this_processor_by_its_own_name(tmp_path: Path) -> None:
    """A target with the features of this machine is what an export for the host is."""
    from torch_mlc.runtime.targets import cpu_target

    host = replace(cpu_target(4), gemm=False)
    weights = written(tmp_path, target=host)
    x, index = arrays(70, 3)
    y = ModelLibrary(tmp_path).call("forward", x, index)[0]
    np.testing.assert_allclose(y, expected(weights, x, index)[0], rtol=1e-6)


def test_a_library_for_aarch64_is_written(tmp_path: Path) -> None:
    """It cannot run here; that its tables and relocations are right, ``tests/codegen/elf/test_aarch64.py`` says."""
    written(tmp_path, target=ARM, machine="aarch64")
    with pytest.raises(LibraryError, match="cannot open"):
        ModelLibrary(tmp_path)
    if shutil.which("readelf"):
        text = subprocess.run(["readelf", "-Wa", str(tmp_path / "model.so")], capture_output=True, text=True).stdout
        assert "AArch64" in text and "TEXTREL" not in text and not re.search("warning|error:", text, re.IGNORECASE)


# --- models with little in them ---------------------------------------------------------------------------------------


def test_a_function_without_inputs_weights_and_kernels(tmp_path: Path) -> None:
    """What is left is a host program that writes a number, for two variants that have no kernel."""
    text = """
define i32 @run(ptr %inputs, ptr %results, ptr %weights, ptr %sizes, ptr %arena, ptr %status) {
  %y = load ptr, ptr %results
  store i64 7, ptr %y
  ret i32 0
}
"""
    nothing_text = text.replace("  %y = load ptr, ptr %results\n  store i64 7, ptr %y\n", "")
    seven = ExportedFunction("seven", (), (spec("y", DType.INT64),), {}, {}, (), sympy.Integer(0), "run", text)
    nothing = ExportedFunction("nothing", (), (), {}, {}, (), sympy.Integer(0), "run", nothing_text)
    model = ExportedModel("little", (seven, nothing), (), (), V3, (KernelVariant(V4, ()),))
    write_library(model, {}, tmp_path)
    found = ModelLibrary(tmp_path)
    assert [int(a) for a in found.call("seven")] == [7]
    assert found.shapes("seven") == [((), ())]
    assert found.call("nothing") == []


def test_empty_tensors_have_no_memory(folder: Folder) -> None:
    """A null pointer is an address like another where there is nothing to read."""
    (two,) = ModelLibrary(folder[0]).call("twice", np.zeros(0, np.float32))
    assert two.shape == (0,)


# --- models that cannot be libraries ----------------------------------------------------------------------------------


def test_models_that_cannot_be_libraries_are_refused(tmp_path: Path) -> None:
    model, weights = sample()
    calls = "declare void @sgemm_()\ndefine void @count(ptr %a) {\n  call void @sgemm_()\n  ret void\n}"
    blas = tuple(replace(k, text=calls) if k.name == "count" else k for k in model.kernels)
    named = tuple(replace(k, name="free") if k.name == "count" else k for k in model.kernels)
    forward = model.functions[0]
    cases = [
        (replace(model, name="a-b"), EmitError, "the model 'a-b' has a name that is no identifier of C"),
        (replace(model, functions=()), EmitError, "there is nothing to call"),
        (replace(model, functions=(forward, forward)), EmitError, "two functions of sample have the name forward"),
        (replace(model, kernels=blas), ElfError, r"sgemm_ \(used by the kernels for x86-64-v3 \("),
        (replace(model, kernels=named), EmitError, "kernels may not have names of the system or of the library: free"),
        (replace(model, machine="riscv64"), EmitError, "no libraries are made for 'riscv64'"),
        (
            replace(model, target=Target("cpu", "znver4", 4)),
            EmitError,
            "what a library for znver4 has to ask its processor for is not known",
        ),
        (
            replace(model, variants=(replace(sample(variants=(V4,))[0].variants[0], kernels=model.kernels[1:]),)),
            EmitError,
            "the variant for x86-64-v4 has other kernels than the model: scale",
        ),
    ]
    for wrong, error, told in cases:
        with pytest.raises(error, match=told):
            write_library(wrong, weights, tmp_path / "no")
        assert not (tmp_path / "no").exists()
    assert model.target == V3
