"""Runs a program: by eager, compiled, in double precision, and in double precision with the errors of eager's types.

The last is Monte Carlo arithmetic: every step that rounds has its operands and its results moved by random relative
errors of the size of a rounding, forward and backward, and so have the operations that it consists of, so that how far
results move says how sure they are.
Source: Parker, Monte Carlo arithmetic, 1997.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..settings import default_dtype
from .program import Program, Sizes, Step
from .rounding import LineRoundings
from .values import Decide, namespace, numbers

# The relative errors of Monte Carlo runs, in units of the type's eps (a rounding is at most half of one).
AMPLITUDE = 4.0
_DTYPES = re.compile(r"torch\.(float32|bfloat16|float16)\b")
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Result:
    """``values``: what was returned, then the inputs as they are afterwards, then gradients of the inputs that ask for
    one (None where there is none). ``shared[k]`` is the first of returned values and inputs whose memory value k is in.
    """

    values: list[Any]
    shared: list[int]
    returned: int
    inputs: int

    def describe(self, k: int) -> str:
        """What value k is."""
        if k < self.returned:
            return f"result {k}"
        k -= self.returned
        return f"input {k} afterwards" if k < self.inputs else f"gradient {k - self.inputs}"


def define(text: str, names: dict[str, Any], what: str) -> Any:
    """A function of that name from its text, which tracebacks can show."""
    where = f"<fuzz {next(_NUMBERS)}>"
    linecache.cache[where] = (len(text), None, text.splitlines(keepends=True), where)
    exec(compile(text, where, "exec"), names)
    return names[what]


def function_of(program: Program, *, compiled: bool = False, decide: Decide = bool) -> Callable[..., Any]:
    """The program as a function of its inputs."""
    fn: Callable[..., Any] = define(program.function(), namespace(compiled=compiled, decide=decide), "fn")
    return fn


def inputs_of(program: Program, sizes: Sizes, *, wide: bool = False) -> list[Any]:
    """Arguments of their own."""
    return list(define(program.makes_inputs(), namespace(wide=wide), "inputs")(**sizes))


def run(program: Program, fn: Callable[..., Any], args: list[Any]) -> Result:
    """Call a function, and differentiate if the program says so."""
    torch.manual_seed(0)
    if not program.gradient:
        with torch.no_grad():
            outputs = list(fn(*args))
        values = [*outputs, *args]
        return Result([_detached(v) for v in values], _shared(values), len(outputs), len(args))
    outputs = list(fn(*args))
    values = [*outputs, *args]
    shared = _shared(values)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad and a.is_leaf]
    # Inputs that autograd has made may have been written.
    grown = [a for a in args if isinstance(a, Tensor) and a.requires_grad and not a.is_leaf]
    ends = [o for o in (*outputs, *grown) if isinstance(o, Tensor) and o.requires_grad]
    gradients: Sequence[Any] = []
    if leaves and ends:
        weights = [_lazy(numbers(e.shape, e.dtype, k)) for k, e in enumerate(ends)]
        gradients = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
    return Result([_detached(v) for v in (*values, *gradients)], shared, len(outputs), len(args))


def _lazy(weight: Tensor) -> Tensor:
    """Of some sizes the negative, or the conjugate, as autograd hands it on: in the same memory, by a bit."""
    if weight.numel() % 3 == 1:
        return torch._neg_view(weight)
    return weight.conj() if weight.numel() % 3 == 2 else weight


def turn(args: Sequence[Any]) -> None:
    """Give arguments other values for the next round: floats in the opposite order, so that they stay what they are
    exact and bounded for. Those whose elements share memory stay.
    """
    for a in args:
        if isinstance(a, Tensor) and a.is_floating_point() and a.is_leaf and a.ndim and 0 not in a.stride():
            with torch.no_grad():
                a.copy_(a.flip(0))


def run_rounds(program: Program, fn: Callable[..., Any], args: list[Any], rounds: int) -> Result:
    """The last of so many calls with the same arguments, which are turned in between."""
    for _ in range(rounds - 1):
        run(program, fn, args)
        turn(args)
    return run(program, fn, args)


def run_wide(program: Program, sizes: Sizes, noise: int | None = None, rounds: int = 1) -> Result:
    """In double precision; with a seed for ``noise``, with the roundings of eager's types."""
    if noise is None:
        return _run_wide(program, sizes, None, rounds)
    try:
        with sdpa_kernel(SDPBackend.MATH), LineRoundings(torch.Generator().manual_seed(noise)) as inside:
            return _run_wide(program, sizes, inside, rounds)
    except Exception:  # higher-order operators and hooks do not know all modes
        return _run_wide(program, sizes, LineRoundings(torch.Generator().manual_seed(noise)), rounds)


def _run_wide(program: Program, sizes: Sizes, noise: LineRoundings | None, rounds: int) -> Result:
    args = inputs_of(program, sizes, wide=True)

    def fn(*made: Any) -> list[Any]:
        names = namespace(wide=True)
        names.update(zip((i.name for i in program.inputs), made, strict=True))
        for step in program.steps:
            execute(step, names, noise)
        return [eval(r, names) for r in program.returns]

    with default_dtype(torch.float64):
        return run_rounds(program, fn, args, rounds)


def code_of(step: Step, *, wide: bool) -> CodeType:
    """The line as code; types are double precision's where it is ``wide``."""
    text = _DTYPES.sub("torch.float64", step.line) if wide else step.line
    return compile(text.replace("torch.complex64", "torch.complex128") if wide else text, "<step>", "exec")


def execute(step: Step, names: dict[str, Any], noise: LineRoundings | None = None) -> None:
    """One step in double precision, with random errors if there is a source of them."""
    code = code_of(step, wide=True)
    own = step.results
    if noise is None:
        exec(code, names)
        return
    generator = noise.generator
    if step.exact or step.kind == "view":
        given = [names[name] for name in step.operands]
        exec(code, names)
        # What is handed through has a hook; torch crashes where a view gets one after a write to its memory.
        own = tuple(n for n in step.results if step.kind == "write" or all(names[n] is not g for g in given))
    else:
        moved = step.operands[1:] if step.kind == "write" else step.operands
        before = {name: names[name] for name in moved}
        names.update({name: _moved(t, step.eps, generator) for name, t in before.items()})
        with noise.of(step.eps):
            exec(code, names)
        names.update(before)
        # Views of what was written are moved with it; torch crashes where they then get a hook.
        own = tuple(n for n in step.results if not (step.kind == "write" and _lies_in(names, n, step.operands[0])))
        names.update({name: _moved(names[name], step.eps, generator) for name in own})
        if step.kind == "write" and _rounded(names[step.operands[0]]):
            target = names[step.operands[0]]
            # What the step has saved of it stays what it was written to be.
            leaf = target.is_leaf and target.requires_grad  # autograd was not told of the write either
            with (
                torch.autograd._unsafe_preserve_version_counter(target),
                torch.set_grad_enabled(torch.is_grad_enabled() and not leaf),
            ):
                target.mul_(_factor(target, step.eps, generator))
    for t in (names[name] for name in own):
        if isinstance(t, Tensor) and t.requires_grad:
            t.register_hook(partial(_move_gradient, 0.0 if step.exact else step.eps, step.eps, noise))


def _move_gradient(inside: float, eps: float, noise: LineRoundings, gradient: Tensor | None) -> Tensor | None:
    """What comes after the gradient of a step's result is that of the step. Of several results that one op makes, those
    that nothing reads have none."""
    if gradient is None:
        noise.eps = inside
        return None
    with noise.of(0.0):
        # A step that is cast to single precision has gradients in that.
        moved = _moved(gradient, eps, noise.generator).to(gradient.dtype)
    noise.eps = inside
    return moved


def _lies_in(names: dict[str, Any], result: str, target: str) -> bool:
    """Whether a result is in the memory of what was written."""
    return _shared([names[target], names[result]]) == [0, 0]


def _rounded(t: Any) -> bool:
    return isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())


def _factor(t: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    return 1 + AMPLITUDE * eps * (2 * torch.rand(t.shape, dtype=torch.float64, generator=generator) - 1)


def _moved(t: Any, eps: float, generator: torch.Generator) -> Any:
    return t * _factor(t, eps, generator) if _rounded(t) else t


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _shared(values: list[Any]) -> list[int]:
    first: dict[int, int] = {}
    found = []
    for k, v in enumerate(values):
        if not isinstance(v, Tensor) or not v.numel() or not v.untyped_storage().nbytes():
            found.append(k)
            continue
        found.append(first.setdefault(v.untyped_storage().data_ptr(), k))
    return found
