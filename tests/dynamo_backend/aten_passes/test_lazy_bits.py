"""Tensors that carry conjugation and negation as bits: arguments, values inside of graphs, and gradients of results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_mlc.runtime.counters import counters
from torch_mlc.runtime.host.lazy_bits import Lazy, memory_of, with_memory_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")

# How a tensor comes by its bits.
BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "conjugated": lambda t: t.conj(),
    "negated": torch._neg_view,
    "both": lambda t: torch._neg_view(t).conj(),
}
COMPLEX: dict[str, Callable[[Tensor], Any]] = {
    "parts": lambda z: (z.conj().imag[1:].sin(), z.mT.conj().imag.contiguous(), z.real * 2),
    "negated inside": lambda z: (torch._neg_view(z.real)[1:].exp(), torch._neg_view(z)[:, ::2] * 2j),
    "reduced": lambda z: (z.conj().imag.sum(0), z.conj().imag.softmax(-1), z.conj()[1:].mean(1)),
    "moved": lambda z: (torch.cat([z.conj()[1:], z * 2]), z.conj().mT.contiguous(), z.conj().imag.flip(0)),
    "ends with gaps": lambda z: ((z * 2).conj().imag, (z * 1j).conj()[:, ::2], torch._neg_view(z.exp())[:, 1:].mT),
    "library": lambda z: (z.conj().mT @ z, z.conj().mT.imag @ z.real, torch.fft.fft(z.conj()[1:])),
    "solved": lambda z: torch.linalg.solve(z + 9 * torch.eye(5), z.conj().imag[:, :2] + 0j),
    "branches": lambda z: torch.cond(z.real.sum() > 0, lambda t: t.exp() * 1, lambda t: t * 2j, (z + 1,)).conj().imag,
}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", COMPLEX)
def test_what_comes_with_bits(name: str, bits: str) -> None:
    fn = COMPLEX[name]
    z = torch.randn(5, 5, dtype=torch.complex64)
    run = torch.compile(fn, backend="mlc")
    close(run(BITS[bits](z)), fn(BITS[bits](z)))
    close(run(z), fn(z))


@pytest.mark.parametrize("given", BITS)
@pytest.mark.parametrize("name", [n for n in COMPLEX if n != "branches"])
def test_gradients_of_results_come_with_bits(name: str, given: str) -> None:
    """Nothing guards what a loss makes of a result: one backward takes every form."""
    fn, z = COMPLEX[name], torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
    run = torch.compile(fn, backend="mlc")
    for bits in ("plain", given, "plain"):
        grads = []
        for f in (fn, run):
            results = f(z) if isinstance(f(z), tuple) else (f(z),)
            torch.manual_seed(2)
            weights = [BITS[bits](torch.randn_like(r)) for r in results]
            grads.append(torch.autograd.grad(results, z, weights))
        close(grads[1], grads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_negated_arguments_in_odd_layouts(dtype: torch.dtype, dynamic: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x + y, x[1:].amax(0), x.t().contiguous(), x.view(-1)[::2] * 2 if x.is_contiguous() else x * 2

    run = torch.compile(fn, backend="mlc", dynamic=dynamic)
    for rows, columns in ((4, 7), (3, 2), (2, 0)):
        x = torch.randint(-9, 9, (rows, columns)).to(dtype)
        for form in (x, x[:, ::2], x.t().contiguous().t(), x[:, :1].expand(rows, columns) if columns else x, x[1:, 1:]):
            y = torch.randint(-9, 9, form.shape).to(dtype)
            negative = torch._neg_view(form)
            if len(form) > 1:
                close(run(negative, y), fn(negative, y))
                close(run(y, negative), fn(y, negative))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("part", ["all", "rows"])
def test_arguments_with_bits_are_written(bits: str, part: str) -> None:
    def fn(z: Tensor, x: Tensor) -> Tensor:
        target = z if part == "all" else z[1:]
        target.mul_(2 + 1j).add_(x[: len(target)])
        return target * 2

    made = [torch.randn(4, 3, dtype=torch.complex64), torch.randn(4, 3)]
    ends = []
    for f in (fn, torch.compile(fn, backend="mlc")):
        z, x = (t.clone() for t in made)
        result = f(BITS[bits](z), torch._neg_view(x))
        ends.append((result, z, x))
    close(ends[1], ends[0])

    def real(x: Tensor) -> None:
        x.add_(1).mul_(3)

    ends = []
    for f in (real, torch.compile(real, backend="mlc")):
        x = made[1].clone()
        f(torch._neg_view(x))
        ends.append(x)
    close(ends[1], ends[0])


def test_graphs_that_differ_in_bits_alone_are_told_apart(tmp_path: Path) -> None:
    """In the cache on disk too: what is traced of a view is the same."""
    options = {"cache_dir": str(tmp_path)}
    x = torch.randn(4, 6)
    for given in (x, torch._neg_view(x), x, torch._neg_view(x)):
        torch._dynamo.reset()
        found = torch.compile(lambda t: t[1:].clone() * 1, backend="mlc", options=options)(given)
        close(found, given[1:].clone())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_a_backward_that_is_as_an_inference_graph(tmp_path: Path, dtype: torch.dtype, bits: str) -> None:
    """The program of the one looks at no bits, and is not that of the other: not even of what was compiled first."""
    run = torch.compile(lambda t: t * 2, backend="mlc", options={"cache_dir": str(tmp_path)}, dynamic=False)
    x = torch.randn(4, dtype=dtype)
    with torch.no_grad():
        close(run(x), x * 2)
    weights = BITS[bits](torch.randn(4, dtype=dtype))
    (found,) = torch.autograd.grad(run(x.requires_grad_()), x, weights)
    close(found, weights * 2)


def test_a_check_of_the_whole_graph_takes_bits_as_they_are() -> None:
    z = torch.randn(5, 5, dtype=torch.complex64)
    for bits in BITS.values():
        run = torch.compile(COMPLEX["parts"], backend="mlc", options={"verify": 2, "cache": False})
        close(run(bits(z)), COMPLEX["parts"](bits(z)))


def test_negation_is_no_copy() -> None:
    """It is done where the kernel reads."""
    z = torch.randn(64, 64, dtype=torch.complex64)
    before = counters.snapshot()
    torch.compile(lambda z: z.conj().imag.exp(), backend="mlc", options={"cache": False})(torch._neg_view(z.real) + 0j)
    after = counters.snapshot()
    assert after["kernel_calls"] - before["kernel_calls"] == 1


def test_memory_of() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    for bits, tensor in {name: make(z) for name, make in BITS.items()}.items():
        for is_conj, is_neg in ((False, False), (True, False), (False, True), (True, True)):
            found = memory_of(tensor, is_conj, is_neg)
            assert (found.is_conj(), found.is_neg()) == (is_conj, False)
            close(found.resolve_conj(), -tensor.resolve_conj().resolve_neg() if is_neg else tensor.resolve_conj())
            alike = (tensor.is_conj(), tensor.is_neg()) == (is_conj, is_neg)
            assert (found.data_ptr() == z.data_ptr()) == alike, (bits, is_conj, is_neg)
    given: list[Any] = []
    call = with_memory_of(lambda args: given.extend(args) or (), [Lazy(1, is_neg=True)])  # type: ignore[func-returns-value]
    x = torch.randn(3)
    call([x, torch._neg_view(x)])
    assert given[0] is x and given[1].data_ptr() == x.data_ptr() and not given[1].is_neg()
    assert with_memory_of(call, []) is call


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "parts": lambda x: x.chunk(2, -1),
    "rows": lambda x: (x.unbind(0)[1], x.sin()),
    "views of parts": lambda x: (x.mT.split(2)[0].expand(3, 2, 4)[:, 1:], x * 2),
    "negated back": lambda x: (torch._neg_view(x).chunk(2)[1], torch._neg_view(x.chunk(2)[0])),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_results_are_views_of_negated_arguments(name: str, gradient: bool, dynamic: bool) -> None:
    if name == "negated back" and dynamic and not gradient:
        pytest.skip("AOTAutograd makes such views itself, and leaves the bit")
    found = []
    for fn in (VIEWS[name], torch.compile(VIEWS[name], backend="mlc", dynamic=dynamic)):
        torch.manual_seed(1)
        x = torch.randn(4, 6, dtype=torch.complex64).conj().imag.requires_grad_(gradient)
        results = fn(x)
        shared = [r.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for r in results]
        leaves = (
            torch.autograd.grad([r * 3 for r in results], x, [r.detach().cos() for r in results]) if gradient else ()
        )
        found.append(([r.detach() for r in results], [r.is_neg() for r in results], shared, leaves))
    close(found[1], found[0])
    assert any(found[1][2])


VARYING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "parts": lambda z, n: z.conj().imag[:n],
    "real parts": lambda z, n: torch._neg_view(z.real)[..., :n],
    "numbers": lambda z, n: torch._neg_view(z).narrow(0, 0, n),
    "conjugated": lambda z, n: z.conj()[:n],
    "twice": lambda z, n: torch._neg_view(torch._neg_view(z.real)[:n]),
}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", VARYING)
def test_negated_views_of_sizes_that_vary(name: str, gradient: bool) -> None:
    """AOTAutograd makes those that it returns again from what autograd knows of the program's, and of their memory
    otherwise, without the bit."""
    fn = VARYING[name]
    run, z = torch.compile(fn, backend="mlc", dynamic=True), torch.randn(5, 4, dtype=torch.complex64)
    for n in (1, 2, 3):
        x = z.clone().requires_grad_(gradient)
        ours, eager = run(x, n), fn(x, n)
        torch.testing.assert_close(ours.detach(), eager.detach(), rtol=0, atol=0)
        assert (ours.is_neg(), ours.is_conj(), ours.data_ptr()) == (eager.is_neg(), eager.is_conj(), eager.data_ptr())


def test_negated_views_of_one_of_several_results() -> None:
    """Results of one op share no memory (206439)."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        (mantissa, power), (top, place) = torch.frexp(x), x.max(0)
        first, second = x.exp().split(2)
        return power, torch._neg_view(mantissa), place, torch._neg_view(top)[1:], first, torch._neg_view(second)

    x = torch.randn(4, 3)
    torch.testing.assert_close(torch.compile(fn, backend="mlc")(x), fn(x))


@pytest.mark.parametrize("gradient", [False, True])
def test_negated_views_of_values_share_their_memory(gradient: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        t = torch.cat([x, x[:2]])
        return t, torch._neg_view(t)[1:], torch._neg_view(x * 3).mT, torch._neg_view(torch._neg_view(t).split(2)[1])

    for compiled in (torch.compile(fn, backend="mlc", dynamic=d) for d in (False, True)):
        x = torch.randn(4, 6, requires_grad=gradient)
        found, expected = compiled(x), fn(x)
        close(found, expected)
        for results in (found, expected):
            places = [r.untyped_storage().data_ptr() for r in results]
            assert [p == places[0] for p in places] == [True, True, False, True]
        if gradient:
            weights = [r.detach().cos() for r in expected]
            close(torch.autograd.grad(found, x, weights), torch.autograd.grad(expected, x, weights))


# Of what its storage holds elements are read that are none of its own.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "argument": lambda z: z.as_strided((3,), (1,), 0) * 0.3,
    "part of it": lambda z: z.mT[1:].as_strided((3, 2), (2, 3), 1) * 0.3,
    "from its own place on": lambda z: z[1:].as_strided((3, 2), (2, 3)) * 0.3,
    "plain again": lambda z: torch._neg_view(z).as_strided((3, 2), (1, 3), 0) * 0.3,
    "given back": lambda z: z.as_strided((3,), (1,), 0),
    "replaced": lambda z: z.as_strided_scatter(z.new_ones(3), (3,), (2,), 1) * 2,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_places_in_the_storage_of_what_is_negated(name: str, dynamic: bool) -> None:
    fn = PLACES[name]
    compiled = torch.compile(fn, backend="mlc", dynamic=dynamic)
    z = torch.randn(4, 4, dtype=torch.complex64)
    for x in (z.conj().imag, torch._neg_view(z.real), z.conj().mT.imag):
        close(compiled(x), fn(x))


def test_places_in_the_storage_of_values_inside() -> None:
    def fn(z: Tensor) -> tuple[Tensor, Tensor]:
        inside = z.conj().imag.as_strided((3, 2), (1, 3), 0) * 0.3
        return inside, (z * 2).conj().imag.as_strided((3, 2), (1, 3), 0).exp()

    z = torch.randn(4, 4, dtype=torch.complex64)
    close(torch.compile(fn, backend="mlc")(z), fn(z))
