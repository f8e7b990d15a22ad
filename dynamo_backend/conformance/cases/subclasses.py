"""Tensors that are more than tensors."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..kit.case import case
from ..kit.compare import unequal
from ..kit.errors import expect
from ..kit.ranks import group_of_one, group_of_two
from ..kit.subject import Subject


class Pair(Tensor):
    """Two tensors of one shape that go through every op side by side, as shards do."""

    first: Tensor
    second: Tensor

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        return Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), storage_offset=first.storage_offset(), dtype=first.dtype,
            device=first.device, requires_grad=first.requires_grad,
        )  # fmt: skip

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pair({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Pair:
        return Pair(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sides = []
        for take in (attrgetter("first"), attrgetter("second")):
            sides.append(func(*tree_map_only(Pair, take, args), **tree_map_only(Pair, take, kwargs or {})))
        if not isinstance(sides[0], Tensor):
            return sides[0]
        return return_and_correct_aliasing(func, args, kwargs or {}, Pair(*sides))


def pair(*shape: int) -> Pair:
    return Pair(torch.randn(shape), torch.randn(shape))


@case("A wrapper goes in and a plain tensor comes out.", "Sharded tensors lose their shards.")
def wrapper_in_and_out(subject: Subject) -> None:
    subject.agrees(lambda x: (torch.sin(x) * 2, x.t() + 1), lambda: (pair(3, 4),))


@case("Gradients of wrappers are plain, or of one part alone.", "Sharded training is wrong on all ranks but one.")
def gradients_of_wrappers(subject: Subject) -> None:
    x = pair(4, 3).requires_grad_()
    y = subject.compile(lambda t: (t * t).sin(), fullgraph=True)(x)
    y.sum().backward()
    expect(isinstance(x.grad, Pair), f"the gradient is a {type(x.grad).__name__}")
    assert isinstance(x.grad, Pair)
    for side in ("first", "second"):
        part = getattr(x, side).detach()
        told = unequal(getattr(x.grad, side), (part * part).cos() * 2 * part)
        expect(not told, f"the gradient of the {side} part {told}")


@case("A wrapper beside plain tensors confuses which is which.", "Weights are sharded, inputs are not.")
def wrapper_beside_plain(subject: Subject) -> None:
    subject.agrees(lambda a, x, b: (x * a + b, a + b), lambda: (torch.randn(3), pair(3), torch.randn(3)))


@case("Writes to a wrapper reach one part.", "Caches are sharded too.")
def written_wrapper(subject: Subject) -> None:
    def f(x: Pair) -> Tensor:
        x.add_(1)
        return x * 2

    subject.agrees(f, lambda: (pair(3, 2),))


class Logged(Tensor):
    """Tells of every function that it goes through."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@case("A class of the user's is lost on the way.", "Units and names are kept in such classes.")
def logging_subclass(subject: Subject) -> None:
    def f(x: Tensor) -> Tensor:
        return torch.cos(x) + 1

    x = torch.randn(3).as_subclass(Logged)
    wanted, got = f(x), subject.compile(f)(x)
    expect(type(got) is type(wanted), f"the result is a {type(got).__name__}, eager's is a {type(wanted).__name__}")
    told = unequal(got.as_subclass(Tensor), wanted.as_subclass(Tensor))
    expect(not told, f"the result {told}")


@case("A Parameter given as an argument is written, or its gradient lost.", "Functional code passes parameters.")
def parameter_as_argument(subject: Subject) -> None:
    subject.agrees(
        lambda x, w: (x @ w, w * 2), lambda: (torch.randn(2, 3), nn.Parameter(torch.randn(3, 3))), train=True
    )


class CosIsSin(TorchFunctionMode):
    """Counts functions, and changes one: cos is sin."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return torch.sin(*args) if func is torch.cos else func(*args, **(kwargs or {}))


@case("A torch_function mode around a call is ignored.", "A default device is such a mode.")
def function_mode(subject: Subject) -> None:
    compiled, x = subject.compile(lambda t: torch.cos(t) * 2), torch.randn(4)
    for inside in (False, True, False):
        if inside:
            with CosIsSin():
                got = compiled(x)
        else:
            got = compiled(x)
        told = unequal(got, (x.sin() if inside else x.cos()) * 2)
        expect(not told, f"{'inside' if inside else 'outside'} of the mode, the result {told}")


@case("A default device around a call is ignored, or stays behind.", "Tensors are made where they should not be.")
def default_device(subject: Subject) -> None:
    compiled = subject.compile(lambda x: x + torch.arange(3))
    with torch.device("cpu"):
        compiled(torch.ones(3))
    with torch.device("meta"):
        made = subject.compile(lambda n: torch.ones(n) * 2)(3)
    expect(made.device.type == "meta", f"with the default device meta a tensor is on {made.device}")
    expect(torch.ones(1).device.type == "cpu", "the default device stayed behind")


class Seen(TorchDispatchMode):
    """Lets every op through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@case("A torch_dispatch mode around a call breaks it.", "Counters of operations and of memory are such modes.")
def dispatch_mode(subject: Subject) -> None:
    compiled, x = subject.compile(lambda t: torch.cos(t) * 2), torch.randn(4)
    compiled(x)
    with Seen():
        got = compiled(x)
    told = unequal(got, x.cos() * 2)
    expect(not told, f"the result in a mode {told}")


# --- tensors that are spread over the processes of a group ------------------------------------------------------------


def placed(x: Tensor, mesh: Any, dim: int | None) -> Any:
    """Rows of a dimension in each process, or all of it in each."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim)])


@case("A sharded result is handed back as a plain tensor.", "What follows would take a shard for the whole.")
def sharded_product(subject: Subject) -> None:
    def f(x: Any, w: Any) -> Any:
        return torch.relu(x @ w) * 2

    x, w = torch.randn(4, 6), torch.randn(6, 8)
    with group_of_one() as mesh:
        compiled = subject.compile(f)
        for _ in range(2):
            given = placed(x, mesh, None), placed(w, mesh, 1)
            got, wanted = compiled(*given), f(*given)
            expect(
                type(got) is type(wanted), f"the result is a {type(got).__name__}, eager's a {type(wanted).__name__}"
            )
            expect(
                got.placements == wanted.placements, f"the result lies {got.placements}, eager's {wanted.placements}"
            )
            told = unequal(got.to_local(), wanted.to_local(), 10)
            expect(not told, f"the result {told}")


@case("A shard that is laid out anew is not waited for.", "Collectives run beside what comes after them.")
def laid_out_anew(subject: Subject) -> None:
    from torch.distributed.tensor import Replicate

    def f(x: Any) -> Any:
        return (x.sin() + 1).redistribute(placements=[Replicate()]).cumsum(0)

    with group_of_one() as mesh:
        x = placed(torch.randn(6, 3), mesh, 0)
        got, wanted = subject.compile(f)(x), f(x)
        told = unequal(got.to_local(), wanted.to_local(), 10)
        expect(got.placements == wanted.placements and not told, f"the result lies {got.placements}, and {told}")


@case("A parameter that is spread gets a plain gradient.", "The optimizer would add a shard to the whole.")
def gradients_of_spread_parameters(subject: Subject) -> None:
    def net(mesh: Any) -> nn.Linear:
        torch.manual_seed(3)
        made = nn.Linear(6, 8)
        for name, p in list(made.named_parameters()):
            setattr(made, name, nn.Parameter(placed(p.detach(), mesh, 0)))
        return made

    with group_of_one() as mesh:
        x, gradients = placed(torch.randn(4, 6), mesh, None), []
        for through in (lambda m: m, subject.compile):
            made = net(mesh)
            through(made)(x).to_local().square().sum().backward()
            gradients.append({name: p.grad for name, p in made.named_parameters()})
        for name, wanted in gradients[0].items():
            got: Any = gradients[1][name]
            expect(type(got) is type(wanted), f"the gradient of {name} is a {type(got).__name__}")
            expect(got.placements == wanted.placements, f"the gradient of {name} lies {got.placements}")  # type: ignore[union-attr]
            told = unequal(got.to_local(), wanted.to_local(), 10)  # type: ignore[union-attr]
            expect(not told, f"the gradient of {name} {told}")


def _reduced(x: Any, w: Any) -> Any:
    """Each process has a part of the sum over the inner dimension; what is done to the sum is done to the whole."""
    from torch.distributed.tensor import Replicate

    return torch.relu((x @ w).redistribute(placements=[Replicate()]) - 0.5) * 2


def _on_two_ranks(subject: Subject, mesh: Any) -> None:
    torch.manual_seed(7)
    plain = torch.randn(4, 6), torch.randn(6, 8)
    compiled, runs = subject.compile(_reduced), []
    for through in (compiled, _reduced):
        x, w = placed(plain[0], mesh, 1).requires_grad_(), placed(plain[1], mesh, 0).requires_grad_()
        through(x, w)
        y = through(x, w)
        y.to_local().square().sum().backward()
        runs.append({"the result": y.detach(), "the gradient of x": x.grad, "the gradient of w": w.grad})
    for name, wanted in runs[1].items():
        got = runs[0][name]
        expect(type(got) is type(wanted), f"{name} is a {type(got).__name__}, eager's a {type(wanted).__name__}")
        expect(got.placements == wanted.placements, f"{name} lies {got.placements}, eager's {wanted.placements}")
        told = unequal(got.to_local(), wanted.to_local(), 10)
        expect(not told, f"{name} {told}")
    told = unequal(runs[0]["the result"].to_local(), torch.relu(plain[0] @ plain[1] - 0.5) * 2, 10)
    expect(not told, f"beside what one process makes of the whole, the result {told}")


@case(
    "A sum over two processes is that of one alone.",
    "In a group of one nobody sees that a collective is missing.",
    starts_processes=True,
)
def two_ranks(subject: Subject) -> None:
    group_of_two(subject, _on_two_ranks)
