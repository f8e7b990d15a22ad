"""One sample of an operator, compiled and compared with eager: values, element types, shapes, strides, gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_mlc.dynamo_backend.entry.backend as backend
import torch_mlc.scheduler.calls.horizontal as horizontal
from torch_mlc.dynamo_backend.compiling.compiled import CompiledGraph

from .cases import REFUSALS, Job, Sample, copied, dense, moved, operators, widened
from .layouts import LAYOUTS
from .traced import without_dynamo

# Values nobody defines: only shape, type and strides are compared.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Those of which the elements that an operand has not are such values, where that has none.
GROWING = ("resize_", "resize_as_")
# What a sample may not end in.
FAULTS = ("wrong", "raises")
# Library calls that compute nothing.
STRUCTURAL = re.compile(
    r"^(mlc::constant|mlc::seeds|aten::sym_|aten::as_strided\.|aten::_assert|aten::alias\.|aten::(new_)?empty)"
)
# Relative errors that two right answers may differ by, as torch's own tests have them, with room for other orders of
# summation.
RELATIVE = {
    torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3,
    torch.complex64: 1e-5, torch.complex128: 1e-9, torch.complex32: 2e-3,
}  # fmt: skip
# So many times operands are moved by a rounding to see how sure a result is.
_MOVES = 4
_MOVED = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)


@dataclass(slots=True)
class Outcome:
    """``status``: ``equal``; ``wrong`` (an answer that is not eager's); ``raises`` (eager answers, compiled code does
    not); ``torch`` (torch's own tracing fails alike, with the backend ``aot_eager``); ``invalid`` (eager raises).
    ``detail`` says what differs. ``graphs`` counts what was compiled: nothing where torch breaks its graph at the
    operator, which then runs eagerly. ``library`` names library calls. Samples that were compiled in one function share
    these.
    """

    status: str
    detail: str = ""
    graphs: int = 0
    kernels: int = 0
    library: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        return asdict(self)


def check(job: Job, sample: Sample) -> Outcome:
    """Run one sample by eager and compiled."""
    return check_all(job, [sample])[0]


def check_all(job: Job, found: list[Sample]) -> list[Outcome]:
    """The outcome of each sample: all are compiled in one function, and by themselves where that differs from eager,
    breaks its graph or draws random numbers.
    """
    # The database's own way to seed an operator is a graph break; samples are seeded from outside.
    with warnings.catch_warnings(), patch.object(common_methods_invocations, "wrapper_set_seed", _plainly):
        warnings.simplefilter("ignore")
        if job.mode in REFUSALS:
            return [_refused(job, sample) for sample in found]
        outcomes: dict[int, Outcome] = {}
        expected: dict[int, list[Any]] = {}
        for k, sample in enumerate(found):
            try:
                expected[k] = _run(job, _function(job, 1), [copied(sample)])[0]
            except Exception as error:
                outcomes[k] = Outcome("invalid", _short(error))
        if len(expected) > 1:
            outcomes |= _together(job, found, expected)
        outcomes |= {k: _alone(job, found[k], e) for k, e in expected.items() if k not in outcomes}
        return [outcomes[k] for k in range(len(found))]


def _alone(job: Job, sample: Sample, expected: list[Any]) -> Outcome:
    """The outcome of one sample in a function of its own."""
    seen: list[CompiledGraph] = []
    (outcome,) = _compare(job, [sample], [expected], "mlc", seen)
    if outcome.status in FAULTS:
        (peer,) = _compare(job, [sample], [expected], "aot_eager", [])
        if peer.status in FAULTS:
            outcome = Outcome("torch", f"{outcome.detail} | aot_eager: {peer.detail}")
    elif any(_draws(op) for g in seen for op in _library(g)):
        # Compared with the numbers of torch's generator; how it runs is seen with those of ours.
        seen.clear()
        (drawn,) = _compare(job, [sample], [expected], "mlc", seen, ours=True)
        outcome = drawn if drawn.status in FAULTS else outcome
    return _counted(outcome, seen)


def _refused(job: Job, sample: Sample) -> Outcome:
    """Of an illegal call: an error of eager's class, or else that which torch's own tracing makes of it."""
    calls, seen = _function(job, 1), list[CompiledGraph]()
    eager = _error(job, calls, sample)
    if eager is None:
        return Outcome("invalid", "eager answers")
    with _recorded(seen):
        ours = _error(job, _compiled(calls, "mlc", cache=False), sample)
    if isinstance(ours, type(eager)):
        return _counted(Outcome("equal"), seen)
    peer = _error(job, _compiled(calls, "aot_eager"), sample)
    detail = f"eager: {_short(eager)} | {_short(ours) if ours else 'no error'}"
    return _counted(Outcome("torch" if type(peer) is type(ours) else "wrong", detail), seen)


def _error(job: Job, fn: Callable[[Any], list[Any]], sample: Sample) -> Exception | None:
    try:
        _run(job, fn, [copied(sample)])
    except Exception as error:
        return error
    return None


def _compiled(calls: Callable[[Any], list[Any]], name: str, **options: object) -> Callable[[Any], list[Any]]:
    torch._dynamo.reset()
    compiled: Callable[[Any], list[Any]] = torch.compile(calls, backend=name, dynamic=False, options=options or None)
    return compiled


def _together(job: Job, found: list[Sample], expected: dict[int, list[Any]]) -> dict[int, Outcome]:
    """The outcomes of samples in one function, without Dynamo where that gives eager's answers. Those that differ are
    looked at by themselves, and may be right then and wrong with others."""
    chosen, seen = list(expected), list[CompiledGraph]()
    args = job, [found[k] for k in chosen], list(expected.values())
    counters["graph_break"].clear()
    with patch.object(horizontal.Tables, "run", _no_tables):
        found_out = _compare(*args, "mlc", seen, dynamo=False)
        if any(o.status in FAULTS for o in found_out):
            seen.clear()
            found_out = _compare(*args, "mlc", seen)
    outcomes = dict(zip(chosen, found_out, strict=True))
    if counters["graph_break"] or any(_draws(op) for g in seen for op in _library(g)):
        return {}
    if all(o.status == "equal" for o in outcomes.values()):
        return {k: _counted(o, seen) for k, o in outcomes.items()}
    kept = {k: _counted(o, seen) for k, o in outcomes.items() if o.status == "equal"}
    alone = {k: _alone(job, found[k], expected[k]) for k, o in outcomes.items() if o.status != "equal"}
    if all(o.status == "equal" for o in alone.values()):
        peers = dict(zip(chosen, _compare(*args, "aot_eager", []), strict=True))
        for k in alone:
            if peers[k].status == "equal":
                alone[k] = Outcome(outcomes[k].status, f"in one graph with others: {outcomes[k].detail}")
    return kept | alone


def _no_tables(tables: Any) -> Any:
    """Samples in one graph have kernels of their own, which know their sizes, as if each were compiled by itself."""
    return tables.graph, dict(tables.functions)


def _counted(outcome: Outcome, seen: list[CompiledGraph]) -> Outcome:
    library = sorted({op for g in seen for op in _library(g)})
    return replace(outcome, graphs=len(seen), kernels=sum(_kernels(g) for g in seen), library=library)


def _compare(
    job: Job, found: list[Sample], expected: list[list[Any]], name: str, seen: list[CompiledGraph], *,
    ours: bool = False, dynamo: bool = True,
) -> list[Outcome]:  # fmt: skip
    """Compile with a backend and compare with eager; with random numbers of ``ours`` no values, which are others."""
    options: dict[str, object] = {"fallback_random": not ours, "cache": False} if name == "mlc" else {}
    calls = _function(job, len(found))
    fn = _compiled(calls, name, **options) if dynamo else without_dynamo(calls, options)
    try:
        with _recorded(seen), config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
            actual = _run(job, fn, [copied(s) for s in found])
    except Exception as error:
        return [Outcome("raises", _short(error)) for _ in found]
    undefined = (*UNDEFINED, *GROWING) if job.mode == "empty" else UNDEFINED
    values = job.op not in undefined and not ours
    outcomes = []
    for sample, a, e in zip(found, actual, expected, strict=True):
        exact = partial(_exact, job, sample)
        detail = difference(a, e, exact, values=values, layout=job.mode != "gradient")
        outcomes.append(Outcome("wrong", detail) if detail else Outcome("equal"))
    return outcomes


def _function(job: Job, count: int) -> Callable[[Any], list[Any]]:
    """What makes so many calls of an operator."""
    info = operators()[job.op]
    op = info.inplace_variant if job.mode == "inplace" else info.op

    def call(calls: Any) -> list[Any]:
        ((x, args, kwargs),) = calls
        return [op(x, *args, **kwargs)]

    def several(calls: Any) -> list[Any]:
        return [op(x, *args, **kwargs) for x, args, kwargs in calls]

    return call if count == 1 else several


def _run(job: Job, fn: Callable[[Any], list[Any]], found: list[Sample]) -> list[list[Any]]:
    torch.manual_seed(0)
    return _RUNNERS[job.mode](job, fn, found)


def _plainly(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# --- what is run, by mode -------------------------------------------------------------------------------------------


def _calls(found: list[Sample]) -> list[Any]:
    return [(s.input, s.args, s.kwargs) for s in found]


def _forward(job: Job, fn: Callable[[Any], list[Any]], found: list[Sample]) -> list[list[Any]]:
    with torch.no_grad():
        return [tree_leaves(result) for result in fn(_calls(found))]


def _inplace(job: Job, fn: Callable[[Any], list[Any]], found: list[Sample]) -> list[list[Any]]:
    """The result, and the operand that was written to."""
    with torch.no_grad():
        return [[*tree_leaves(result), s.input] for result, s in zip(fn(_calls(found)), found, strict=True)]


def _out(job: Job, fn: Callable[[Any], list[Any]], found: list[Sample]) -> list[list[Any]]:
    """The results, and the tensors that were written to; those are made like what the call without them gives."""
    with torch.no_grad():
        given = []
        for s in found:
            torch.manual_seed(0)
            like = operators()[job.op].op(s.input, *s.args, **s.kwargs)
            given.append(tree_map_only(torch.Tensor, torch.ones_like, like))
        torch.manual_seed(0)
        results = fn([(s.input, s.args, {**s.kwargs, "out": out}) for s, out in zip(found, given, strict=True)])
        return [[*tree_leaves(result), *tree_leaves(out)] for result, out in zip(results, given, strict=True)]


def _gradient(job: Job, fn: Callable[[Any], list[Any]], found: list[Sample]) -> list[list[Any]]:
    """Results, then the gradients of all operands that ask for one, for random gradients of the results."""
    parts, ends, weights, leaves = [], list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for result, s in zip(fn(_calls(found)), found, strict=True):
        results = tree_leaves(s.ends(result))
        asking = [t for t in tree_leaves(_calls([s])) if isinstance(t, torch.Tensor) and t.requires_grad]
        last = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
        if not asking or not last:
            asking, last = [], []
        generator = torch.Generator().manual_seed(1)
        ends += last
        leaves += asking
        drawn = [torch.randn(t.shape, generator=generator, dtype=torch.float32) for t in last]
        # Rounded to the element type of the job also where a reference is computed in a wider one.
        weights += [w.to(getattr(torch, job.dtype)).to(t.dtype) for w, t in zip(drawn, last, strict=True)]
        parts.append(([_detached(t) for t in results], len(asking)))
    grads = iter(torch.autograd.grad(ends, leaves, weights, allow_unused=True) if leaves else ())
    return [[*results, *islice(grads, count)] for results, count in parts]


def _detached(t: Any) -> Any:
    return t.detach() if isinstance(t, torch.Tensor) else t


_RUNNERS = {
    "forward": _forward, "gradient": _gradient, "inplace": _inplace, "out": _out,
    **dict.fromkeys((*LAYOUTS, *REFUSALS), _forward),
}  # fmt: skip


def _exact(job: Job, sample: Sample, seed: int | None = None) -> list[Any] | None:
    """The results in float64, with a ``seed`` those of operands moved by a rounding; None where there are none."""
    try:
        wide = widened(copied(sample))
        return _run(job, _function(job, 1), [wide if seed is None else moved(wide, seed, getattr(torch, job.dtype))])[0]
    except Exception:
        return None


# --- what was compiled ----------------------------------------------------------------------------------------------


@contextmanager
def _recorded(seen: list[CompiledGraph]) -> Iterator[None]:
    real = backend.compile_graph

    def recording(*args: Any, **kwargs: Any) -> CompiledGraph:
        found = real(*args, **kwargs)
        seen.append(found)
        return found

    with patch.object(backend, "compile_graph", recording):
        yield


def _kernels(graph: CompiledGraph) -> int:
    match = re.match(r"# \S+ (\d+) kernels?", graph.text.text)
    return int(match[1]) if match else 0


def _draws(op: str) -> bool:
    """Whether an op of torch takes from its generator."""
    return torch.Tag.nondeterministic_seeded in getattr(_torch_op(op), "tags", ())


def _torch_op(op: str) -> Any:
    """An op by its name in programs, ``aten::rand.default``; None where it is none of torch's."""
    name, _, overload = op.partition(".")
    space, _, packet = name.partition("::")
    return getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)


def _library(graph: CompiledGraph) -> set[str]:
    """The ops of torch that a program calls for what they compute."""
    return {
        op
        for op in graph.text.called.values()
        if not STRUCTURAL.match(op) and not getattr(_torch_op(op), "is_view", False)
    }


# --- comparison -----------------------------------------------------------------------------------------------------


def difference(
    actual: list[Any], expected: list[Any], exact: Callable[..., list[Any] | None], *, values: bool, layout: bool
) -> str:
    """What differs, "" where nothing does that may not. ``exact()`` gives the results in float64, and ``exact(seed)``
    those of operands that are moved by a rounding: as far as these move a result, no number of their type tells it."""
    if len(actual) != len(expected):
        return f"{len(actual)} results, eager has {len(expected)}"
    wide: list[Any] | None = None
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(e, torch.Tensor) or not isinstance(a, torch.Tensor):
            if not _same_object(a, e):
                return f"result {k} is {a!r:.80}, eager's {e!r:.80}"
            continue
        if (a.dtype, a.shape, a.layout) != (e.dtype, e.shape, e.layout):
            return f"result {k} is {_kind(a)}, eager's {_kind(e)}"
        if dense(e) and layout and _strides(a) != _strides(e):
            return f"result {k} of shape {tuple(e.shape)} has strides {a.stride()}, eager's {e.stride()}"
        if not values:
            continue
        if _close(a, e):
            continue
        wide = wide or exact() or []
        reference = wide[k] if k < len(wide) else None
        text = _apart(a, e, reference)
        if text and isinstance(reference, torch.Tensor) and e.dtype in _MOVED:
            text = _apart(
                a, e, reference, _unsure(reference, [others[k] for n in range(_MOVES) if (others := exact(n))])
            )
        if text:
            return f"result {k} ({_kind(e)}): {text}"
    return ""


def _same_object(a: Any, e: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(e, torch.Tensor):
        return False
    return a == e or (a != a and e != e) or (isinstance(e, float) and abs(a - e) <= 1e-5 * abs(e))


def _kind(t: torch.Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" + ("" if dense(t) else f" {t.layout}")


def _strides(t: torch.Tensor) -> tuple[int, ...]:
    """Strides as far as they mean anything."""
    return tuple(s for n, s in zip(t.shape, t.stride()) if n > 1) if t.numel() else ()


def _plain(t: torch.Tensor) -> torch.Tensor:
    t = t.detach()
    t = t.resolve_conj().resolve_neg() if dense(t) else t.to_dense()
    return t.dequantize() if t.is_quantized else t


def _close(a: torch.Tensor, e: torch.Tensor) -> bool:
    a, e = _plain(a), _plain(e)
    tolerance = RELATIVE.get(e.dtype)
    if tolerance is None:
        return bool(torch.equal(a, e))
    return bool(torch.allclose(a, e, rtol=tolerance, atol=tolerance, equal_nan=True))


def _unsure(reference: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    """How far each element of a result moves with its operands."""
    found = [(_plain(reference) - _plain(other)).abs() for other in others]
    return torch.stack(found).amax(0).nan_to_num(0.0, 0.0) if found else torch.zeros(())


def _apart(a: torch.Tensor, e: torch.Tensor, reference: Any, unsure: torch.Tensor | float = 0.0) -> str:
    """Where two tensors differ by more than eager errs, or than ``unsure``; "" nowhere. With no reference, where they
    differ at all."""
    a, e = _plain(a), _plain(e)
    wide = torch.complex128 if e.is_complex() else torch.float64
    tolerance = RELATIVE.get(e.dtype, 0.0)
    left, right = a.to(wide), e.to(wide)
    alike = (left == right) | (left.isnan() & right.isnan())
    alike |= (left - right).abs() <= tolerance * (1 + right.abs())
    if isinstance(reference, torch.Tensor) and reference.shape == e.shape and (e.is_floating_point() or e.is_complex()):
        truth = _plain(reference).to(wide)
        alike |= left == truth.to(e.dtype).to(wide)
        alike |= left.isnan() & truth.isnan()
        error, allowed = (left - truth).abs(), 2 * (right - truth).abs() + tolerance * (1 + truth.abs())
        alike |= error <= allowed + 2 * unsure
    wrong = ~alike
    if not bool(wrong.any()):
        return ""
    place = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} differ; at {place}: {a[place].item()!r}, eager's {e[place].item()!r}"


def _short(error: BaseException) -> str:
    text = str(error).strip()
    lines = [
        line for line in text.splitlines() if line.strip() and "TORCH" not in line and "NoneType: None" not in line
    ]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}"[:400]
