"""``MLC_VERIFY=2``: every run of a graph is compared with its ATen ops, and a difference traced to the first op.

A graph's inputs are kept, the compiled program runs as always, then the ATen graph runs on the copies. Where they
differ, the graph is cut behind its nodes, by bisection, and each part compiled and compared again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.errors import MlcError
from ..importing.graph_key import BY_PLACE
from ..tracing.origins import origins_of

Boxed = Callable[[list[Any]], Sequence[Any]]
# Of the generator of the CPU, and of each GPU where any is in use.
States = tuple[Tensor, list[Tensor]]
# The largest error allowed, as a share of a tensor's largest magnitude, by the coarsest type that a graph computes in.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_WRITES = torch.ops.higher_order.auto_functionalized_v2
# Inputs are moved by so much of the tolerance to see how sure a value is, and errors so many times as large allowed.
MOVED, MARGIN = 1e-3, 16
# Positions and truth values change where two numbers are equal but for rounding: so many elements of them may.
TURNED = 0.01


class WrongResultError(MlcError):
    """A compiled graph gave another answer than its ATen ops."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two tensors differ most: the element and its two values."""

    what: str
    index: tuple[int, ...]
    got: object
    want: object

    def __str__(self) -> str:
        return f"{self.what} at {list(self.index)}: compiled {self.got}, ATen {self.want}"


def verified(gm: fx.GraphModule, call: Boxed, compile_part: Callable[[fx.GraphModule], Boxed], name: str) -> Boxed:
    """``call`` with a comparison behind every run. ``compile_part`` compiles a part of the graph in the same way.

    The function raises VerifyError, which names the first op whose compiled value differs and the element.
    """
    check = _Check(gm, compile_part, name, _tolerance(gm), _looks_around(gm))

    def run(args: list[Any]) -> Sequence[Any]:
        given = list(args)
        kept = check.copies(given)
        state = _generators()
        results = call(args)
        check.compare(given, kept, results, state)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True, slots=True)
class _Check:
    gm: fx.GraphModule
    compile_part: Callable[[fx.GraphModule], Boxed]
    name: str
    tolerance: float
    # Whether the graph reads what lies around its inputs in their storages.
    around: bool = False

    def copies(self, values: Sequence[Any]) -> list[Any]:
        """Inputs, in memory of their own."""
        return [_copy(v, self.around) for v in values]

    def compare(self, given: Sequence[Any], kept: Sequence[Any], results: Sequence[Any], state: States) -> None:
        """Raise where results, or inputs that the graph writes, are not what the ATen graph makes of the copies."""
        names = [*(f"output {k}" for k in range(len(results))), *(f"input {k}" for k in range(len(given)))]
        found = self.first_difference(self.gm, names, [*results, *given], kept, state)
        if found is None:
            return
        where, at = self.bisected(kept, state)
        raise WrongResultError(
            f"{self.name} differs from its ATen ops: {found}.\n"
            f"{where}{'' if at is None else f': {at}'}\n"
            "MLC_DUMP_DIR writes down every stage of the graph; options={'numerics': 'eager'} rounds where eager does."
        )

    def by_aten(self, gm: fx.GraphModule, kept: Sequence[Any], state: States, by: float = 0.0) -> list[Any]:
        """Results of a graph's ATen ops, then its inputs after them; of inputs moved ``by`` so small a share."""
        inputs = [moved(a, by, k) for k, a in enumerate(self.copies(kept))]
        with _with_generators(state), torch.no_grad():
            return [*_Aten(gm).run(*inputs), *inputs]

    def first_difference(
        self, gm: fx.GraphModule, names: Sequence[str], got: Sequence[Any], kept: Sequence[Any], state: States
    ) -> Difference | None:
        wanted = self.by_aten(gm, kept, state)[: len(names)]
        if not any(_differs(*row, 0.0, self.tolerance) for row in zip(names, got, wanted, strict=True)):
            return None
        # Sums that cancel are as far off as a rounding of the inputs makes them.
        others = self.by_aten(gm, kept, state, by=self.tolerance * MOVED)
        for name, g, w, other in zip(names, got, wanted, others, strict=False):
            found = _differs(name, settled(g, w, [other]), w, distance(w, other), self.tolerance)
            if found is not None:
                return found
        return None

    def bisected(self, kept: Sequence[Any], state: States) -> tuple[str, Difference | None]:
        """The first op after which the compiled value differs, told in words, and where."""
        nodes = [n for n in self.gm.graph.nodes if n.op == "call_function" and _is_compared(n)]
        low, high, found = 0, len(nodes), None
        while low < high:
            middle = (low + high) // 2
            at = self.part_differs(nodes[middle], kept, state)
            if at is None:
                low = middle + 1
            else:
                high, found = middle, at
        if found is None:
            return "No part of it differs by itself: the fault is in how parts are fused", None
        node = nodes[high]
        line = next((o.source for o in origins_of(node, str(node.target)) if o.source), "")
        return f"The first op that differs is {node.target} ({node.name}){f', {line}' if line else ''}", found

    def part_differs(self, node: fx.Node, kept: Sequence[Any], state: States) -> Difference | None:
        part = _cut_behind(self.gm, node)
        with _with_generators(state):
            got = self.compile_part(part)(self.copies(kept))
        return self.first_difference(part, [node.name], got, kept, state)


def _differs(what: str, got: Any, want: Any, unsure: float, tolerance: float) -> Difference | None:
    if not isinstance(got, Tensor) or not isinstance(want, Tensor):
        return None
    return difference(what, got, want, tolerance, unsure)


def difference(what: str, got: Tensor, want: Tensor, tolerance: float, unsure: float = 0.0) -> Difference | None:
    """Where two tensors of one shape differ most, if by more than rounding explains; NaN equals NaN.

    ``unsure``: how far the wanted values move with a rounding of what they are made of.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return Difference(what, (), f"{got.dtype}{list(got.shape)}", f"{want.dtype}{list(want.shape)}")
    if not want.numel():
        return None
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        other = got != want
        if other.float().mean() <= max(TURNED if tolerance else 0.0, unsure):
            return None
        return _at(what, got, want, int(other.flatten().float().argmax()))
    x, y = (t.detach().to(torch.complex128 if t.dtype.is_complex else torch.float64) for t in (got, want))
    same = (x == y) | (x.isnan() & y.isnan())
    finite = y.abs()[y.isfinite()]
    scale = finite.max().item() if finite.numel() else 0.0
    error = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)
    if error.max().item() <= tolerance * scale + MARGIN * unsure:
        return None
    return _at(what, got, want, int(error.flatten().argmax()))


def _at(what: str, got: Tensor, want: Tensor, position: int) -> Difference:
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), want.shape))
    return Difference(what, index, got[index].item(), want[index].item())


def _generators() -> States:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


@contextmanager
def _with_generators(states: States) -> Iterator[None]:
    """Random numbers as from these states on, and afterwards as if nothing had been drawn."""
    with torch.random.fork_rng(devices=range(len(states[1]))):
        torch.set_rng_state(states[0])
        for device, state in enumerate(states[1]):
            torch.cuda.set_rng_state(state, device)
        yield


class _Aten(fx.Interpreter):
    """Runs a graph's ops one by one."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[Any, Any]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if n.target is _WRITES:
            # To places in the storage of tracing.
            offsets = [b.meta["val"].storage_offset() for b in n.kwargs["_all_bases"]]  # type: ignore[union-attr]
            rows = zip(kwargs["_all_bases"], offsets, strict=True)
            kwargs = {**kwargs, "_all_bases": [_at_offset(b, at) if isinstance(at, int) else b for b, at in rows]}
        return args, kwargs


def _at_offset(value: Tensor, offset: int) -> Tensor:
    """The same tensor, in memory that begins so many elements before it; itself where its own does."""
    if value.storage_offset() == offset:
        return value
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride())) if value.numel() else 0
    room = value.new_empty(offset + span)
    room[offset:].copy_(value.as_strided((span,), (1,)))
    return room.as_strided(value.shape, value.stride(), offset)


def _looks_around(gm: fx.GraphModule) -> bool:
    """Whether a graph has ops that name a place in the storage of a value."""
    return any(n.target in BY_PLACE for n in gm.graph.nodes)


def _copy(value: Any, around: bool) -> Any:
    """A value in memory of its own; of a tensor with what is ``around`` it in its storage, if that is asked for."""
    if not isinstance(value, Tensor):
        return value
    if value.is_conj():
        return _copy(value.conj(), around).conj()
    if value.is_neg():
        return torch._neg_view(_copy(torch._neg_view(value), around))
    if around:
        storage = value.untyped_storage().clone()
        return value.new_empty(0).set_(storage, value.storage_offset(), value.shape, value.stride())
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value.detach()) if 0 not in value.stride() else value.detach().clone()


def moved(value: Any, by: float, seed: int) -> Any:
    """A tensor of floats whose elements are moved, in place, by about so small a share of themselves."""
    if by == 0 or not isinstance(value, Tensor) or not value.is_floating_point() or 0 in value.stride():
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return value.copy_(value.double() * (1 + by * noise.to(value.device)))


def distance(a: Any, b: Any) -> float:
    """How far a tensor moved; for positions and truth values, the share of elements that turned."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or not a.numel():
        return 0.0
    if not a.is_floating_point():
        return (a != b).float().mean().item()
    return (a.double() - b.double()).abs().nan_to_num(nan=0.0, posinf=0.0).max().item()


def settled(got: Any, want: Any, others: Sequence[Any]) -> Any:
    """``got``, with what is wanted where a rounding makes a number an infinity or a NaN, or back: where one of
    ``others`` is so, which are what is wanted but for roundings."""
    for other in others:
        if isinstance(got, Tensor) and isinstance(other, Tensor) and got.shape == want.shape == other.shape:
            turned = (other.isfinite() != want.isfinite()) | (other.isnan() != want.isnan())
            got = torch.where(turned, want, got) if got.dtype == want.dtype else got
    return got


def _is_compared(node: fx.Node) -> bool:
    value, op = node.meta.get("val"), str(node.target)
    # Memory that nobody has written holds anything, and what an op has written over is compared where it is read.
    return isinstance(value, Tensor) and "empty" not in op and not op.endswith("copy_.default")


def _cut_behind(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """The graph that computes one node of another."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for n in gm.graph.nodes:
        known[n] = graph.node_copy(n, lambda old: known[old])
        if n is node:
            break
    places = [n for n in gm.graph.nodes if n.op == "placeholder"]
    assert all(p in known for p in places), "placeholders come first"
    graph.output((known[node],))
    graph.eliminate_dead_code()
    return fx.GraphModule(gm, graph)


def _tolerance(gm: fx.GraphModule) -> float:
    kinds = {v.dtype for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), Tensor)}
    return max((TOLERANCE[k] for k in kinds if k in TOLERANCE), default=0.0)
