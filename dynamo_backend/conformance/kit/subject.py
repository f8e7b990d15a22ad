"""The backend under test, and the ways in which cases ask it for the same as eager."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .compare import differences, unequal
from .errors import Violation, expect
from .observe import Observation, observe, seen

Make: TypeAlias = "Callable[[], Sequence[Any]]"


class UnknownBackendError(ValueError):
    """A name that neither torch nor Python knows a backend by."""


@dataclass(frozen=True)
class Subject:
    """A backend: a name that `torch.compile` takes, or ``package.module:function``; the options that it is given.

    ``other_options`` are a second set, under which half types round otherwise. ``patience`` are the seconds after which
    a call hangs. Raises UnknownBackendError.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    other_options: Mapping[str, Any] | None = None
    patience: float = 60.0

    def __post_init__(self) -> None:
        if not callable(self.backend) and self.name not in torch._dynamo.list_backends(exclude_tags=()):
            known = ", ".join(torch._dynamo.list_backends(exclude_tags=()))
            raise UnknownBackendError(
                f"no backend {self.name!r}. There are: {known}; or name a function as package.module:function"
            )

    @functools.cached_property
    def backend(self) -> str | Callable[..., Any]:
        """What `torch.compile` is given as ``backend=``."""
        module, colon, attribute = self.name.partition(":")
        if not colon:
            return self.name
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownBackendError(f"no backend {self.name!r}: {error}") from error
        return found

    def compile(self, function: Any, *, options: Mapping[str, Any] | None = None, **others: Any) -> Any:
        """`torch.compile` with the backend and its options."""
        given = self.options if options is None else options
        return torch.compile(function, backend=self.backend, options=dict(given) or None, **others)

    def agrees(
        self,
        function: Callable[..., Any],
        *makes: Make,
        train: bool = False,
        module: bool = False,
        dynamic: bool | None = None,
        whole: bool = True,
        leave_out: Sequence[str] = (),
        loose: float = 1.0,
        backward: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """One compiled function does what eager does, with the arguments that each of ``makes`` gives, in order.

        With a single one it is called twice. ``module`` says that ``function`` makes a module, which is what is
        compiled; its parameters and buffers are compared too. ``train`` sends a gradient into each result that takes
        one. ``whole`` has a graph break be an error. ``leave_out`` names what may differ (`compare.PARTS`).
        Raises Violation with the differences.
        """
        left_out, pull = frozenset(leave_out), (backward or send_gradients) if train else None
        calls = list(makes) if len(makes) > 1 else [*makes, *makes]
        eager_fn, ours_fn = (_made(function) if module else function for _ in range(2))
        compiled = self.compile(ours_fn, dynamic=dynamic, fullgraph=whole)
        earlier: list[tuple[Observation, Observation, int]] = []
        for number, make in enumerate(calls):
            theirs = observe(eager_fn, _arguments(make, number), _state(eager_fn), pull)
            mine = observe(compiled, _arguments(make, number), _state(ours_fn), pull)
            found = list(differences(mine, theirs, left_out, loose))
            if found:
                raise Violation(f"call {number + 1}: " + "; ".join(found[:6]))
            earlier.append((mine, theirs, number))
        for mine, _, number in earlier[:-1]:
            for name, kept in mine.kept:
                before = mine.results[name]
                now = seen(kept)
                told = "" if "values" in left_out or module else unequal(now.value, before.value)  # type: ignore[attr-defined]
                expect(not told, f"{name} of call {number + 1} was changed by a later call: it {told}")

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Nothing compiled before, or left behind; seeds and settings of torch as a new process has them."""
        with _settings_kept():
            torch._dynamo.reset()
            torch.manual_seed(0)
            try:
                yield
            finally:
                torch._dynamo.reset()


def _made(factory: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return factory()


def _arguments(make: Make, number: int) -> Sequence[Any]:
    torch.manual_seed(10 + number)
    made = make()
    torch.manual_seed(100 + number)
    return made


def _state(function: Any) -> dict[str, Tensor]:
    if not isinstance(function, nn.Module):
        return {}
    parameters = {f"parameter {name}": p for name, p in function.named_parameters()}
    return parameters | {f"buffer {name}": b for name, b in function.named_buffers()}


def send_gradients(results: Sequence[Tensor]) -> None:
    """A different weight for each element of each result, and the gradient of their sum."""
    terms = []
    for result in results:
        plain = result.reshape(-1)
        weights = torch.linspace(0.5, 1.5, plain.numel(), dtype=torch.float64, device=plain.device)
        terms.append((plain * weights.to(plain.real.dtype if plain.is_complex() else plain.dtype)).sum())
    total = sum(t.real.double() + t.imag.double() if t.is_complex() else t.double() for t in terms)
    if isinstance(total, Tensor):
        total.backward()


@contextmanager
def _settings_kept() -> Iterator[None]:
    before = (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.get_rng_state(),
    )  # fmt: skip
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.use_deterministic_algorithms(before[1])
        torch.set_num_threads(before[2])
        torch.set_grad_enabled(before[3])
        torch.set_rng_state(before[4])
