"""Types and values: promotion, overflow, NaN and infinities."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kit.case import case
from ..kit.subject import Subject

inf, nan = float("inf"), float("nan")


@case("Types that mix give another type.", "A float64 model runs in float32, or integers become floats.")
def promotion(subject: Subject) -> None:
    def f(i: Tensor, h: Tensor, b: Tensor, d: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return i + h, i + 0.5, b + b, b + 1, h + 1.5, i / 2, i // 2, d + h, u + i, u * 2, b * d, i.sum(), b.sum()

    subject.agrees(
        f,
        lambda: (
            torch.tensor([1, 2], dtype=torch.int32), torch.ones(2).half(), torch.tensor([True, False]),
            torch.ones(2).double(), torch.tensor([200, 100], dtype=torch.uint8),
        ),
    )  # fmt: skip


@case("A tensor without dimensions promotes as one with dimensions.", "Scalars of float64 are everywhere.")
def scalars_do_not_promote(subject: Subject) -> None:
    def f(x: Tensor, s: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        return x + s, x * n, s + n, n * 0.5, x * 1e-3

    make = lambda: (torch.ones(2), torch.tensor(2.5, dtype=torch.float64), torch.tensor(3))  # noqa: E731
    subject.agrees(f, make)


@case("Integers saturate, or are computed in a wider type.", "Hashes and checksums rely on wrapping.")
def overflow(subject: Subject) -> None:
    def f(i: Tensor, b: Tensor, u: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return i + 1, i * 3, b * b, u + u, -b, b.abs(), w * w, i.sum(), b << 1

    def make() -> tuple[Tensor, ...]:
        return (
            torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int32), torch.tensor([127, -128, 3], dtype=torch.int8),
            torch.tensor([255, 128, 1], dtype=torch.uint8), torch.tensor([2**40, -(2**62), 3]),
        )  # fmt: skip

    subject.agrees(f, make)


@case("Large integers go through floats.", "Identifiers above 2^53 change.")
def large_integers(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x // 3, x % 1000, torch.where(x > 2**53, x, 0), x.max(), x.clamp(max=2**62 + 1)

    subject.agrees(f, lambda: (torch.tensor([2**53 + 1, 2**62 + 3, -(2**60) - 1]),))


@case("Division and remainder of negative numbers round the other way.", "C rounds to zero, Python down.")
def negative_division(subject: Subject) -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (
            a // b, a % b, torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b),
            a.float() // b.float(), a.float() % b.float(), torch.fmod(a.float(), b.float()), a >> 1,
        )  # fmt: skip

    subject.agrees(f, lambda: (torch.tensor([7, -7, 7, -7, 0]), torch.tensor([2, 2, -2, -2, -3])))


@case("NaN is lost on the way.", "Training goes on with numbers that should have stopped it.")
def nan_goes_through(subject: Subject) -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.relu(x), torch.maximum(x, y), x.clamp(-1, 1), x.max(), x.amin(), x * 0, torch.sign(x), x == x,
            torch.where(x > 0, x, y), x.sum(), torch.fmax(x, y), x.argmax(), torch.nn.functional.gelu(x),
            x.sort().values,
        )  # fmt: skip

    subject.agrees(f, lambda: (torch.tensor([1.0, nan, -2.0, 0.0]), torch.tensor([nan, 1.0, 3.0, nan])))


@case("Infinities become NaN, or the largest number.", "Masks are filled with them.")
def infinities(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x - x, x * 0, 1 / x, torch.exp(x), torch.sigmoid(x), torch.tanh(x), x.sum(), torch.softmax(x, -1),
            torch.log1p(x.abs()), torch.nn.functional.softplus(x), x.isfinite(), torch.logsumexp(x, -1),
        )  # fmt: skip

    subject.agrees(f, lambda: (torch.tensor([[inf, -inf, 1.0], [-inf, -inf, 0.0], [1e38, -1e38, 80.0]]),))


@case("A row that is masked whole is not NaN as in eager.", "Padding in attention gives such rows.")
def masked_rows(subject: Subject) -> None:
    def f(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.masked_fill(mask, -inf)
        return torch.softmax(scores, -1), torch.logsumexp(scores, -1)

    make = lambda: (torch.randn(3, 4), torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]]))  # noqa: E731
    subject.agrees(f, make)


@case("The sign of zero is lost.", "atan2 and divisions go by it.")
def signed_zeros(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (
            1 / (x * 1),
            1 / -x,
            torch.copysign(torch.ones_like(x), x),
            torch.atan2(x, -x),
            1 / (x + 0.0),
            x.signbit(),
        )

    subject.agrees(f, lambda: (torch.tensor([0.0, -0.0]),))


@case("Numbers below the normal ones become zero.", "Torch flushes them only when it is asked to.")
def subnormal_numbers(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 0.5) * 2.0**60, x.double() * 1.0

    subject.agrees(f, lambda: (torch.tensor([1e-38, 3e-39, -2e-40]),))


@case("Floats become integers by rounding.", "Eager cuts the fraction off.")
def floats_to_integers(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.int(), x.long(), x.abs().to(torch.uint8), x.bool(), x.round(), x.trunc()

    subject.agrees(f, lambda: (torch.tensor([1.5, -1.5, 2.5, 0.49, -0.51, 100.99]),))


@case("Half types round otherwise than to even.", "Casts are where that shows.")
def roundings_of_casts(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.bfloat16(), x.half(), (x * 1.0).bfloat16()

    edge = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 65519.0, 65520.0, 1e-7, -3e-8, 3.4e38]
    subject.agrees(f, lambda: (torch.tensor(edge),))


@case("float64 is computed in float32.", "Half of the digits are gone.")
def double_precision(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.sin(x), torch.exp(x), torch.softmax(x, -1), x.sum(), x @ x.t(), x.std(), torch.erf(x), x * 0.1

    subject.agrees(f, lambda: (torch.randn(5, 6, dtype=torch.float64),))


@case("Among equal numbers another one is chosen.", "Beam search and metrics take the first.")
def ties(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.argmax(1), x.argmin(0), x.max(1).indices, x.sort(dim=1, stable=True).indices

    subject.agrees(f, lambda: (torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [0.0, 0.0, 0.0]]),))


@case("A variance of large numbers is noise.", "The sum of squares is taken first.")
def large_means(subject: Subject) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x.var(-1), torch.nn.functional.layer_norm(x, (64,))

    subject.agrees(f, lambda: (torch.randn(3, 64) + 4096,), loose=100)
