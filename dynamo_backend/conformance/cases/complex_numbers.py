"""Complex tensors, and the bits that say that one is conjugate or negative."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import expect
from ..kit.subject import Subject


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.complex64)


@case("Complex tensors are an error, or lose a part.", "Signals and rotary embeddings are complex.")
def complex_arithmetic(subject: Subject) -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return a * b, a / b, a.abs(), torch.angle(a), a.real + b.imag, torch.exp(a), a.sum(), a @ b.t(), a == b

    subject.agrees(f, lambda: (numbers(3, 4), numbers(3, 4)), loose=10)


@case("A conjugate input is read as if it were not.", "conj() sets a bit, and changes no memory.")
def conjugate_input(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x.imag + 1, x.sum(), x.abs(), torch.view_as_real(x.resolve_conj())

    subject.agrees(f, lambda: (numbers(4).conj(),), lambda: (numbers(4),), lambda: (numbers(4).conj(),))


@case("A conjugate result loses its bit.", "It shares memory with its input in eager.")
def conjugate_result(subject: Subject) -> None:
    subject.agrees(lambda x: (x.conj(), (x * 2).conj()), lambda: (numbers(3),), leave_out=["shared"])
    compiled, x = subject.compile(lambda t: t.conj()), numbers(3)
    told = unequal(compiled(x).resolve_conj(), x.conj().resolve_conj())
    expect(not told, f"the conjugate {told}")


@case("A negative view is read with the wrong sign.", "The imaginary part of a conjugate is such a view.")
def negative_input(subject: Subject) -> None:
    def make() -> tuple[Tensor]:
        x = numbers(4).conj().imag
        expect(x.is_neg(), "torch gives no negative view here")
        return (x,)

    subject.agrees(lambda x: (x + 1, x.exp(), x.sum()), make, lambda: (torch.randn(4),), make)


@case("Real views of complex memory are copies.", "They are how parts are read and written.")
def real_views(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.view_as_real(x), x.real

    subject.agrees(f, lambda: (numbers(3),))


@case("What is written through a real view does not reach the complex tensor.", "Parts are normalized in place.")
def written_real_view(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        torch.view_as_real(x).mul_(2)
        return x + 1

    subject.agrees(f, lambda: (numbers(3),))


@case("Gradients of complex tensors are conjugated, or real.", "Torch gives the conjugate derivative.")
def complex_gradients(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (x * y).abs(), (x * x.conj()).real, torch.view_as_complex(torch.stack([x.imag, x.real], -1)) * 2

    subject.agrees(f, lambda: (numbers(4).requires_grad_(), numbers(4).requires_grad_()), train=True, loose=10)


@case("A Fourier transform gives another layout, or half of it.", "Spectra are complex, and their inputs real.")
def fourier_transform(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.fft.rfft(x)
        return torch.fft.irfft(s * 2, n=x.shape[-1]), s.abs()

    subject.agrees(f, lambda: (torch.randn(3, 8, requires_grad=True),), train=True, loose=10)
