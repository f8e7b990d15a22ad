"""Exported models that leave products to a library in the caller's hands: numbers, and how it is found."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim, export

import torch_mlc
from torch_mlc.runtime.export.open import LibraryError, ModelLibrary

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="a small CBLAS is made by gcc"),
]
# A CBLAS of plain loops, which counts its calls.
SOURCE = """
int calls;
#define GEMM(name, type) \\
  void cblas_##name(int layout, int ta, int tb, int m, int n, int k, type alpha, const type *a, int lda, \\
                    const type *b, int ldb, type beta, type *c, int ldc) { \\
    ++calls; \\
    int odd = layout != 101 || lda < (ta == 111 ? k : m) || ldb < (tb == 111 ? n : k) || ldc < n; \\
    if (odd) { calls = -1000; return; } \\
    for (int i = 0; i < m; ++i) for (int j = 0; j < n; ++j) { \\
      double sum = 0; \\
      for (int p = 0; p < k; ++p) sum += (double)(ta == 111 ? a[(long)i * lda + p] : a[(long)p * lda + i]) * \\
                                         (tb == 111 ? b[(long)p * ldb + j] : b[(long)j * ldb + p]); \\
      c[(long)i * ldc + j] = alpha * sum + (beta != 0 ? beta * c[(long)i * ldc + j] : 0); } }
GEMM(sgemm, float)
#ifndef LACKS
GEMM(dgemm, double)
#endif
"""


@pytest.fixture(scope="module")
def cblas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("cblas"))


def built(folder: Path, *flags: str) -> Path:
    (folder / "cblas.c").write_text(SOURCE)
    path = folder / "libsmallblas.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", *flags, folder / "cblas.c", "-o", path], check=True)
    return path


class Products(nn.Module):
    """Every form: a bias, a transposed operand, batches with and without something added, float64, rows of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(200, 300), nn.Linear(300, 150, bias=False)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        h = self.b(torch.relu(self.a(x)))
        batch = torch.baddbmm(y, y, y.transpose(1, 2), beta=0.5, alpha=2.0)
        return h, batch, torch.bmm(y.transpose(1, 2), y), z.T @ z, x[:, 10:190] @ h.new_ones(180, 120)


def arguments(rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    return torch.randn(rows, 200), torch.randn(3, 160, 160), torch.randn(170, 190, dtype=torch.float64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    model = Products().eval()
    program = export(model, arguments(256), dynamic_shapes=({0: Dim("rows", min=0, max=4096)}, None, None))
    path = tmp_path_factory.mktemp("products")
    torch_mlc.export(program, path, libraries=("cblas",))
    return path, model


def test_products_are_the_librarys(folder: tuple[Path, nn.Module], cblas: Path) -> None:
    path, model = folder
    loaded = torch_mlc.load(path, cblas=cblas)
    assert loaded.library.signature["products"] == ["sgemm", "dgemm"]
    count = ctypes.c_int.in_dll(ctypes.CDLL(str(cblas)), "calls")
    for rows in (256, 1, 0, 33):
        count.value = 0
        given = arguments(rows)
        with torch.no_grad():
            wanted = model(*given)
        found = loaded(*given)
        assert count.value >= 3
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_functions_by_address(folder: tuple[Path, nn.Module], cblas: Path) -> None:
    path, model = folder
    library = ctypes.CDLL(str(cblas))
    given = {f: ctypes.cast(getattr(library, f"cblas_{f}"), ctypes.c_void_p).value for f in ("sgemm", "dgemm")}
    found = torch_mlc.load(path, cblas=given)(*arguments(5))
    with torch.no_grad():
        for a, b in zip(found, model(*arguments(5)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_products_in_branches_and_loops(cblas: Path, tmp_path: Path) -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cond(x.sum() > 0, lambda x: self.linear(x).tanh(), lambda x: x * 0.5, (x,))
            start = torch.zeros((), dtype=torch.int64)
            return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, self.linear(x).tanh()), (start, x))[1]

    torch.manual_seed(0)
    model = Turns().eval()
    torch_mlc.export(export(model, (torch.randn(256, 256),)), tmp_path, libraries=("cblas",))
    loaded = torch_mlc.load(tmp_path, cblas=cblas)
    count = ctypes.c_int.in_dll(ctypes.CDLL(str(cblas)), "calls")
    for sign, calls in ((1, 4), (-1, 3)):
        count.value = 0
        x = sign * torch.rand(256, 256)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-4)
        assert count.value == calls


def test_what_is_missing_is_told(folder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    path, _ = folder
    lacking = built(tmp_path, "-DLACKS")
    cases: list[tuple[Any, str, str]] = [
        (None, "argument", "multiplies by a library of products: name one in the options (cblas), or give its"),
        ("libnowhere.so.7", "library", "the library of products libnowhere.so.7 cannot be loaded: libnowhere.so.7"),
        (lacking, "library", f"the library of products {lacking} has no cblas_dgemm: it is none of CBLAS"),
        ({"sgemm": 1}, "argument", "or give its cblas_dgemm (dgemm)"),
    ]
    for given, kind, told in cases:
        with pytest.raises(LibraryError, match=re.escape(told)) as caught:
            ModelLibrary(path, cblas=given)
        assert caught.value.kind == kind


def test_what_only_kernels_do_stays_theirs(tmp_path: Path) -> None:
    """Convolutions, sorts and half types are no products of CBLAS: kernels compute them, or the export is refused."""

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(8, 16, 3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return self.c(x), torch.topk(y, 3).values, y.bfloat16() @ y.bfloat16().T

    model = Others().eval()
    given = torch.randn(1, 8, 12, 12), torch.randn(64, 64)
    torch_mlc.export(export(model, given), tmp_path, libraries="cblas")
    loaded = torch_mlc.load(tmp_path)  # nothing is asked for
    assert loaded.library.signature["products"] == []
    with torch.no_grad():
        for a, b in zip(loaded(*given), model(*given), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=0.1)
    with pytest.raises(
        torch_mlc.ExportError, match="libraries= names 'mkl', and exported models can call 'cblas' alone"
    ):
        torch_mlc.export(export(model, given), tmp_path, libraries=("mkl",))
    with pytest.raises(torch_mlc.ExportError, match="multiplies on processors, and this library is for GPUs"):
        torch_mlc.export(export(model, given), tmp_path, libraries=("cblas",), targets=("cuda:sm_90",))
