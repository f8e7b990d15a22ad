"""A program compiled and compared with eager: values, types, shapes, strides, writes, shared memory, gradients."""

from __future__ import annotations

import ast
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from .program import DRAW, Program, Sizes
from .run import Result, function_of, inputs_of, run, run_rounds, run_wide, turn
from .shrink import pruned

# Relative errors that nobody looks at twice; what exceeds them is measured against double precision.
RELATIVE = {
    torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3,
    torch.complex64: 2e-6, torch.complex128: 1e-12,
}  # fmt: skip
# Monte Carlo runs, and how many times the distance they move a result may be off.
RUNS, MARGIN = (4, 32), 4.0
# Torch's own tracing: what it answers alike is no fault of a compiler's.
PEER = "aot_eager"
FAULTS = ("wrong", "raises", "crash", "hang")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status``: ``equal``; ``wrong`` (an answer that is not eager's); ``raises`` (eager answers, compiled code does
    not); ``torch`` (torch's own tracing differs alike, with the backend ``aot_eager``); ``invalid`` (eager raises, or
    it is not judged).
    """

    status: str
    detail: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)


class Unsuitable(BaseException):
    """A program that is not judged: nobody would wait for it, or it needs what is not here."""


def check(program: Program, backend: Any = "mlc") -> Outcome:
    """Run a program at all its sizes by eager and compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fn = function_of(program)
            expected = [_expected(program, fn, sizes) for sizes in program.sizes]
        except Exception as error:
            return Outcome("invalid", _short(error))
        try:
            outcome = _compare(program, expected, backend)
        except Unsuitable as error:
            return Outcome("invalid", str(error))
        if " has strides " in outcome.detail and (said := _strides_of_fakes(program, outcome.detail)):
            return Outcome("torch", f"{outcome.detail} | {said}")
        if " has strides " in outcome.detail and _compare(program, expected, as_promised).detail == outcome.detail:
            return Outcome("torch", f"{outcome.detail} | as AOTAutograd's graph promises")
        if outcome.status == "wrong" and " differ" in outcome.detail and (said := _layouts_of_draws(program)):
            return Outcome("torch", f"{outcome.detail} | {said}")
        if outcome.status in FAULTS and backend != PEER:
            peer = _compare(program, expected, PEER)
            if peer.status == "raises" and outcome.status == "wrong":
                # Control flow of torch's refuses arguments and gradients that are conjugated or negated by a bit.
                bare = replace(program, gradient=False)
                peer = _compare(bare, [_expected(bare, fn, sizes) for sizes in bare.sizes], PEER, _without_bits)
            if peer.status in FAULTS and _symptom(peer.detail) == _symptom(outcome.detail):
                return Outcome("torch", f"{outcome.detail} | {PEER}: {peer.detail}")
        return outcome


def _in_promised_strides(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """The graph by torch's own ops, with results in the strides that its fake tensors have, as a compiler has to."""
    (end,) = gm.graph.find_nodes(op="output")
    promised = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in end.args[0]]

    def call(*args: Any) -> list[Any]:
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        return [_laid_out(found, want, given) for found, want in zip(gm(*args), promised, strict=True)]

    return call


def _laid_out(found: Any, want: Any, given: set[int]) -> Any:
    """A result in other strides, unless it is in memory of an argument, or sizes vary."""
    if not isinstance(found, Tensor) or found.untyped_storage().data_ptr() in given:
        return found
    strides = want.stride()
    if found.stride() == strides or not all(type(n) is int for n in strides):
        return found
    return found.new_empty_strided(want.shape, strides).copy_(found)


as_promised = aot_autograd(fw_compiler=_in_promised_strides)


def _symptom(detail: str) -> tuple[str, str]:
    """Of what an outcome tells, and in which way it differs or raises."""
    found = re.match(r"(?:result|input|gradient) \d+(?: afterwards)?", detail)
    if found is None:
        return "", re.split(r"[:(]", detail)[0]
    ways = ("has strides", "shares memory", " differ;")
    return found[0], next((way for way in ways if way in detail), "")


def _expected(program: Program, fn: Callable[..., Any], sizes: Sizes) -> list[Result]:
    return [run_rounds(program, fn, inputs_of(program, sizes), k + 1) for k in range(program.rounds)]


def _without_bits(args: list[Any]) -> list[Any]:
    """The same values, none of them conjugated or negated by a bit."""

    def plain(a: Any) -> Any:
        if not isinstance(a, Tensor) or not (a.is_conj() or a.is_neg()):
            return a
        return a.detach().resolve_conj().resolve_neg().requires_grad_(a.requires_grad)

    return [plain(a) for a in args]


def _compare(
    program: Program,
    expected: list[list[Result]],
    backend: Any,
    given: Callable[[list[Any]], list[Any]] = lambda args: args,
) -> Outcome:
    torch._dynamo.reset()
    options = {"options": {"fallback_random": True, **program.options}} if backend == "mlc" else {}
    compiled = torch.compile(function_of(program, compiled=True), backend=backend, dynamic=program.dynamic, **options)
    elsewhere = backend == "mlc" and "target" in program.options
    # The first sizes come again at last: what is kept between calls may not show.
    for sizes, wanted in [*zip(program.sizes, expected, strict=True), (program.sizes[0], expected[0][:1])]:
        args = given(inputs_of(program, sizes))
        for k, want in enumerate(wanted):
            at = f"{sizes}, round {k}" if k else f"{sizes}"
            try:
                with _settings(program), interpreted() if elsewhere else nullcontext():
                    if k:
                        turn(args)
                    got = run(program, compiled, args)
            except Exception as error:
                return Outcome("raises", f"{_short(error)} at {at}")
            if detail := difference(got, want, lambda runs, s=sizes, n=k + 1: Reference.of(program, s, n, runs)):
                return Outcome("wrong", f"{detail} at {at}")
    return Outcome("equal")


def _strides_of_fakes(program: Program, detail: str) -> str:
    """Whether torch's fake tensors, which say what strides a compiled result has, differ from eager alike."""
    found = re.match(r"result (\d+) of shape .* has strides (\(.*?\)), eager's", detail)
    if found is None or int(found[1]) >= len(program.returns):
        return ""
    # What data decide elsewhere has no fake value, and nothing to do with it.
    program = pruned(replace(program, returns=(program.returns[int(found[1])],)))
    promised = ast.literal_eval(found[2])
    for sizes, kind in _kinds(program):
        fake = _layout_of_fake(program, sizes, kind)
        if fake is not None and all(n <= 1 or a == b for (n, a), b in zip(fake, promised, strict=True)):
            return f"torch's fake tensors have strides {found[2]}"
    return ""


def _layouts_of_draws(program: Program) -> str:
    """Whether torch's fake tensors say of an operand of a line that draws that it lies otherwise in memory than eager's
    does: numbers are drawn in the order of memory."""
    for step in program.steps:
        if not DRAW.search(step.line):
            continue
        for name in step.operands:
            made = pruned(replace(program, returns=(name,), gradient=False))
            for sizes, kind in _kinds(made):
                real = run(made, function_of(made), inputs_of(made, sizes)).values[0]
                fake = _layout_of_fake(made, sizes, kind) if isinstance(real, Tensor) else None
                if fake is not None and tuple(a for n, a in fake if n > 1) != _strides(real):
                    return (
                        f"torch's fake tensors have strides {tuple(a for _, a in fake)} for {name}, of which is drawn"
                    )
    return ""


def _kinds(program: Program) -> Iterator[tuple[Sizes, DimDynamic | None]]:
    """The sizes of a program, and which symbols may stand for them; None for none."""
    # Sizes that vary are symbols, of which torch asks for strides more carefully: one for all sizes that are equal, as
    # a first compilation has them, or one a dimension.
    kinds = [None] if program.dynamic is False else [None, DimDynamic.DUCK, DimDynamic.DYNAMIC]
    return itertools.product(program.sizes, kinds)


def _layout_of_fake(program: Program, sizes: Sizes, kind: DimDynamic | None) -> list[tuple[int, int]] | None:
    """Extents and strides of what a program first returns for fake tensors; None where sizes or ways that data decide
    have no fake value, or it is empty."""
    given = [a.detach() if isinstance(a, Tensor) else a for a in inputs_of(program, sizes)]
    ways = iter(_ways(program, sizes))
    mode, symbolic = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=kind is None), kind is not None
    # With symbols among its arguments an op is what Python says of it.
    with mode, enable_python_dispatcher() if symbolic else nullcontext(), torch.no_grad():
        args = [_fake(mode, a, kind, k) for k, a in enumerate(given)]
        try:
            fake = function_of(program, decide=lambda _: next(ways))(*args)[0]
            found = [(int(n), int(a)) for n, a in zip(fake.shape, fake.stride(), strict=True)]
        except Exception:
            return None
    return None if any(n == 0 for n, _ in found) else found


def _ways(program: Program, sizes: Sizes) -> list[bool]:
    """Which way each predicate leads that data decide, in the order in which eager asks."""
    found: list[bool] = []

    def note(predicate: Any) -> bool:
        found.append(bool(predicate))
        return found[-1]

    run(program, function_of(program, decide=note), inputs_of(program, sizes))
    return found


def _fake(mode: FakeTensorMode, x: Any, kind: DimDynamic | None, k: int) -> Any:
    if not isinstance(x, Tensor):
        if kind is None or type(x) is not int or mode.shape_env is None:
            return x
        symbol = mode.shape_env.create_unspecified_symbol(x, ConstantSource(f"x{k}"), kind)
        return mode.shape_env.create_symintnode(symbol, hint=x)
    if kind is None:
        return mode.from_tensor(x)
    context = StatelessSymbolicContext(dynamic_sizes=[kind] * x.dim())
    return mode.from_tensor(x, source=ConstantSource(f"x{k}"), symbolic_context=context)


def interpreted() -> AbstractContextManager[None]:
    """Where kernels for a GPU run that is not here: what programs of the CPU need nothing of."""
    from .interpreted import interpreted as found

    return found()


@contextmanager
def _settings(program: Program) -> Iterator[None]:
    with config.patch(
        capture_dynamic_output_shape_ops=program.capture, capture_scalar_outputs=program.capture,
        suppress_errors=False, fail_on_recompile_limit_hit=False,
    ):  # fmt: skip
        yield


# --- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """Results in double precision, and by Monte Carlo arithmetic; empty what raises."""

    truth: list[Any]
    moved: list[list[Any]]

    @classmethod
    def of(cls, program: Program, sizes: Sizes, rounds: int, runs: int) -> Reference:
        try:
            truth = run_wide(program, sizes, None, rounds).values
        except Exception:
            return cls([], [])
        try:
            return cls(truth, [run_wide(program, sizes, noise, rounds).values for noise in range(runs)])
        except Exception:
            return cls(truth, [])  # what is as near the truth as eager is right all the same


def difference(got: Result, want: Result, reference: Callable[[int], Reference]) -> str:
    """What differs, "" where nothing does that may not. ``reference`` is asked for so many Monte Carlo runs."""
    if len(got.values) != len(want.values):
        return f"{len(got.values)} values, eager has {len(want.values)}"
    measured: Reference | None = None
    for k, (a, e) in enumerate(zip(got.values, want.values, strict=True)):
        what = want.describe(k)
        if not isinstance(e, Tensor) or not isinstance(a, Tensor):
            # AOTAutograd hands zeros on for results that nobody differentiates, where the graph breaks behind them.
            handed = k >= want.returned + want.inputs and e is None and isinstance(a, Tensor) and not a.any()
            if not handed and not _same_object(a, e):
                return f"{what} is {a!r:.80}, eager's {e!r:.80}"
            continue
        if (a.dtype, a.shape) != (e.dtype, e.shape):
            return f"{what} is {_kind(a)}, eager's {_kind(e)}"
        layout = k < want.returned + want.inputs
        if layout and _strides(a) != _strides(e):
            return f"{what} of shape {tuple(e.shape)} has strides {a.stride()}, eager's {e.stride()}"
        if _close(a, e):
            continue
        text = ""
        for runs in RUNS:  # a few may lead all the same way by chance
            if measured is None or 0 < len(measured.moved) < runs:
                measured = reference(runs)
            if not (text := _apart(a, e, measured, k)):
                break
        if text:
            return f"{what} ({_kind(e)}): {text}"
    if got.shared != want.shared:
        k = next(k for k, (a, e) in enumerate(zip(got.shared, want.shared, strict=True)) if a != e)
        who = [want.describe(s) if s != k else "nothing before it" for s in (got.shared[k], want.shared[k])]
        return f"{want.describe(k)} shares memory with {who[0]}, eager's with {who[1]}"
    return ""


def _close(a: Tensor, e: Tensor) -> bool:
    tolerance = RELATIVE.get(e.dtype)
    if tolerance is None:
        return bool(torch.equal(a, e))
    return bool(torch.allclose(a, e, rtol=tolerance, atol=tolerance, equal_nan=True))


def _apart(a: Tensor, e: Tensor, reference: Reference, k: int) -> str:
    """Where two tensors differ by more than eager errs; "" nowhere."""
    wide = torch.complex128 if e.is_complex() else torch.float64
    rounds = e.dtype in RELATIVE
    left, right = (a.to(wide), e.to(wide)) if rounds else (a, e)
    alike = (left == right) | (left.isnan() & right.isnan())
    truth = reference.truth[k] if k < len(reference.truth) else None
    moved = [values[k] for values in reference.moved if k < len(values)]
    if not isinstance(truth, Tensor) or truth.shape != e.shape or any(m.shape != e.shape for m in moved):
        # The program is as good as its shapes: what data decide may differ in double precision.
        if rounds:
            alike |= (left - right).abs() <= 10 * RELATIVE[e.dtype] * (1 + right.abs())
    elif not rounds:
        for m in moved:
            alike |= m != truth
    else:
        alike |= _near(left, right, truth.to(wide), [m.to(wide) for m in moved], RELATIVE[e.dtype], e.dtype)
    wrong = ~alike
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    exact = f", in double precision {truth[place].item()!r}" if isinstance(truth, Tensor) and rounds else ""
    return (
        f"{int(wrong.sum())} of {wrong.numel()} differ; at {place}: {a[place].item()!r}, eager's {e[place].item()!r}"
        + exact
    )


def _near(
    left: Tensor, right: Tensor, truth: Tensor, moved: list[Tensor], tolerance: float, dtype: torch.dtype
) -> Tensor:
    """Where the compiled result is as near the truth as eager's rounding and the program's condition allow."""
    spread = torch.zeros(truth.shape, dtype=torch.float64)
    unsure = torch.zeros(truth.shape, dtype=torch.bool)
    for m in moved:
        distance = (m - truth).abs()
        unsure |= ~torch.isfinite(distance) & ~((m == truth) | (m.isnan() & truth.isnan()))
        spread = torch.maximum(spread, distance.nan_to_num(nan=0.0, posinf=0.0))
    # By chance no run may have moved an element: its neighbours say something of it too.
    if spread.numel():
        spread = torch.maximum(spread, spread.square().mean().sqrt() / 4)
    error = (right - truth).abs().nan_to_num(nan=0.0, posinf=0.0)
    # Sums inside one step cancel too, and no run moves them: they err by the size of the tensor's elements.
    scale = float(truth.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if truth.numel() else 0.0
    # Where all of them cancel eager has no digit of any, and how far it is off by chance is all that is known.
    chance = float(error.max()) if error.numel() and float(error.max()) > scale else 0.0
    allowed = 2 * error + MARGIN * (spread + chance) + tolerance * (2 * truth.abs() + scale) + _least(dtype)
    near = (left - truth).abs() <= allowed
    near |= left == truth.to(dtype).to(left.dtype)
    near |= left.isnan() & truth.isnan()
    return near | unsure


def _least(dtype: torch.dtype) -> float:
    """What underflow may lose."""
    return 16 * float(torch.finfo(dtype).tiny)


def _same_object(a: Any, e: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(e, Tensor):
        return False
    if isinstance(e, float) and isinstance(a, float):
        return math.isclose(a, e, rel_tol=1e-5, abs_tol=1e-5) or (a != a and e != e)
    return bool(a == e) and type(a) is type(e)


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"


def _strides(t: Tensor) -> tuple[int, ...]:
    """Strides as far as they mean anything."""
    return tuple(s for n, s in zip(t.shape, t.stride()) if n > 1) if t.numel() else ()


def _short(error: BaseException) -> str:
    text = str(error).strip()
    lines = [
        line for line in text.splitlines() if line.strip() and "TORCH" not in line and "NoneType: None" not in line
    ]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:400]
