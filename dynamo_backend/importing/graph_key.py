"""The key of a graph: equal for graphs that compile to the same program, in this process or another.

Made from the FX graph itself, before anything is imported: ops, arguments, shapes and strides of every value, what is
known of the sizes, and the contents of the module's own constants. Size symbols and nodes are numbered, so that names
do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from ...ir.graph.constants import digest_of
from ...runtime.cache.fingerprint import environment_fingerprint, key_of
from ..aten_passes.views.negations import BIT
from ..converters.context import KEEPS, KEEPS_ROUNDING

# Constants of more elements are not read for a key.
_MOST_ELEMENTS = 1 << 16
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = frozenset((int, bool, float, str, type(None)))
# Ops with arguments that are places in the storage of a value, which a value's type does not tell.
BY_PLACE = frozenset(
    (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default,
     torch.ops.higher_order.auto_functionalized_v2)
)  # fmt: skip
_MARKS = (KEEPS_ROUNDING, BIT, "unbacked_bindings")
_SEQUENCES = frozenset((tuple, list, fx.immutable_collections.immutable_list, torch.Size))


class _NoKey(Exception):
    """The graph holds an object whose meaning no text tells."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """``text`` is the hex key; ``parts`` are digests of what it is made of, by name, which explain a miss.

    ``nodes`` tells of each node what it is, but for the nodes that it reads, and those in the order of its arguments.
    """

    text: str
    parts: Mapping[str, str]
    nodes: Mapping[fx.Node, tuple[str, Sequence[fx.Node]]] = field(default_factory=dict, repr=False, compare=False)

    def differing(self, parts: Mapping[str, str]) -> tuple[str, ...]:
        """The names of the parts that another key does not share."""
        return tuple(name for name in {**self.parts, **parts} if self.parts.get(name) != parts.get(name))


def graph_key(
    gm: fx.GraphModule, example_inputs: Sequence[Any], static: Collection[int], surroundings: Mapping[str, str]
) -> GraphKey | None:
    """The key of a graph and of everything that decides its code, or None where it cannot have one.

    ``surroundings`` is what lies outside the graph, by name: settings and targets.
    """
    writer = _KeyWriter()
    try:
        writer.graph(gm, example_inputs)
    except _NoKey:
        return None
    graph = key_of(writer.lines)
    told = len(writer.lines)
    writer.sizes()
    texts = {"versions and sources": environment_fingerprint(), **surroundings, "parameters": repr(sorted(static))}
    parts = {
        **{name: key_of([text]) for name, text in texts.items()},
        "graph": graph,
        "what is known of sizes": key_of(writer.lines[told:]),
    }
    return GraphKey(key_of(parts.values()), parts, writer.nodes)


class _KeyWriter:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.nodes: dict[fx.Node, tuple[str, Sequence[fx.Node]]] = {}
        self._names: dict[fx.Node, str] = {}
        # The nodes that the arguments read which are being written.
        self._reads: list[fx.Node] = []
        # Texts of tensors and names of ops: layers that repeat have the same ones.
        self._tensors: dict[tuple[Any, ...], str] = {}
        self._targets: dict[Any, str] = {}
        self._symbols: dict[sympy.Symbol, str] = {}
        self._texts: dict[sympy.Expr, str] = {}
        self._shape_env: Any = None

    def graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> None:
        names, position = self._names, 0
        for node in gm.graph.nodes:
            name = names[node] = f"%{len(names)}"
            reads: list[fx.Node] = []
            self._reads = reads
            val = node.meta.get("val")
            if node.op == "placeholder":
                if val is None and position < len(example_inputs):
                    val = example_inputs[position]
                position += 1
                text = f"input {self.value(val)}"
            elif node.op == "get_attr":
                # Constants are found by their node's name when a stored program is loaded.
                text = f"constant {node.name} {self.value(val)}"
            elif node.op == "output":
                text = f"return {self.argument(node.args)}"
            else:
                args, kwargs = self.argument(node.args), self.argument(node.kwargs) if node.kwargs else "()"
                target = self._targets.get(node.target) or self.target(node.target)
                text = f"{target} {args} {kwargs} {self.value(val)}{self.places(node)}{self.marks(node)}"
            self.nodes[node] = text, reads
            self.lines.append(f"{name} = {text} of {' '.join([names[n] for n in reads])}")
            if node.op == "get_attr":
                self.attribute(gm, str(node.target))

    def places(self, node: fx.Node) -> str:
        """Where in their storages the values are that a node looks at or writes to by places in a storage."""
        if node.target not in BY_PLACE:
            return ""
        vals = [n.meta.get("val") for n in node.all_input_nodes]
        return f" at {self.argument([v.storage_offset() for v in vals if isinstance(v, torch.Tensor)])}"

    def marks(self, node: fx.Node) -> str:
        """What passes over the graph of forward and backward noted of a node, and importing asks."""
        kept = node.meta.get(KEEPS)
        return "".join([f" {mark}" for mark in _MARKS if node.meta.get(mark)] + ([f" {KEEPS} {kept}"] if kept else []))

    def target(self, target: Any) -> str:
        if isinstance(target, (OpOverload, HigherOrderOperator)):
            known = str(target)
        else:
            module = getattr(target, "__module__", "")
            if module not in ("_operator", "math") and not module.startswith("torch."):
                raise _NoKey
            known = f"{module}.{target.__name__}"
        self._targets[target] = known
        return known

    def attribute(self, gm: fx.GraphModule, target: str) -> None:
        value: Any = gm
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            self.lines.append("{")
            self.graph(value)
            self.lines.append("}")
        elif type(value) in (torch.Tensor, torch.nn.Parameter) and value.numel() <= _MOST_ELEMENTS:
            self.lines.append(f"{self.value(value)} {digest_of(value)}")
        else:
            raise _NoKey

    def value(self, val: Any) -> str:
        """A result as its metadata tells it."""
        if isinstance(val, torch.Tensor):
            if type(val).__name__ not in ("FakeTensor", "Tensor", "Parameter"):
                raise _NoKey
            return self.tensor(val)
        if isinstance(val, (list, tuple)):
            return f"({','.join([self.value(v) for v in val])})"
        if val is None or isinstance(val, (int, float, bool, str, *_SYMBOLIC)):
            return self.argument(val)
        return type(val).__name__

    def tensor(self, val: torch.Tensor) -> str:
        # Asked of a fake tensor, where this is most of what a key takes, the device is a property in Python.
        device = getattr(val, "fake_device", None) or val.device
        bits = val.is_conj(), val.is_neg()
        if val._has_symbolic_sizes_strides:
            return self.tensor_of(val, device, bits)
        kind = val.shape, val.stride(), val.dtype, device, bits
        known = self._tensors.get(kind)
        if known is None:
            known = self._tensors[kind] = self.tensor_of(val, device, bits)
        return known

    def tensor_of(self, val: torch.Tensor, device: torch.device, bits: tuple[bool, bool]) -> str:
        lazy = f" conjugated {bits[0]} negated {bits[1]}" if any(bits) else ""
        return f"{val.dtype}{self.sizes_of(val.shape)}{self.sizes_of(val.stride())}{device}{lazy}"

    def sizes_of(self, sizes: Sequence[Any]) -> str:
        """A shape, or strides."""
        return f"({','.join([repr(s) if type(s) is int else self.argument(s) for s in sizes])})"

    def argument(self, arg: Any) -> str:
        kind = type(arg)  # in the order of how many there are
        if kind in _PLAIN:
            return repr(arg)
        if kind is fx.Node:
            self._reads.append(arg)
            return "%"
        if kind in _SEQUENCES:
            return f"({','.join([repr(a) if type(a) in _PLAIN else self.argument(a) for a in arg])})"
        match arg:
            case fx.Node():
                self._reads.append(arg)
                return "%"
            case bool() | int() | float() | str() | None | complex():
                return repr(arg)
            case tuple() | list():
                return f"({','.join([self.argument(a) for a in arg])})"
            case dict():
                return f"({','.join([f'{k}={self.argument(v)}' for k, v in arg.items()])})"
            case slice():
                return f"slice({self.argument((arg.start, arg.stop, arg.step))})"
            case torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return str(arg)
        if isinstance(arg, _SYMBOLIC):
            self._shape_env = self._shape_env or arg.node.shape_env
            return self.expression(arg.node.expr)
        if isinstance(arg, (OpOverload, HigherOrderOperator)):
            return str(arg)
        raise _NoKey

    def expression(self, expr: sympy.Expr) -> str:
        known = self._texts.get(expr)
        if known is None:
            new = sorted(expr.free_symbols - self._symbols.keys(), key=lambda s: s.name)
            self._symbols.update({s: f"s{len(self._symbols) + k}" for k, s in enumerate(new)})
            known = str(expr.xreplace({s: sympy.Symbol(self._symbols[s]) for s in expr.free_symbols}))
            self._texts[expr] = known
        return known

    def sizes(self) -> None:
        """What the ShapeEnv knows of sizes: guards and assertions, which importing asks for signs and ones; bounds;
        typical values to a power of two, since schedules go by them."""
        env, known = self._shape_env, self._symbols.keys()
        divisible = getattr(env, "divisible", None) or ()
        facts = (f for f in (*divisible, *(env.get_axioms() if env is not None else ())) if f.free_symbols <= known)
        self.lines += sorted({f"holds {self.expression(f)}" for f in facts})
        # torch 2.11 has the values under the second name, which later versions warn of.
        values = getattr(env, "backed_var_to_val", None)
        if values is None:
            values = getattr(env, "var_to_val", None) or {}
        for symbol, name in self._symbols.items():
            bounds = env.var_to_range.get(symbol) if env is not None else None
            hint = values.get(symbol)
            is_number = hint is not None and getattr(hint, "is_Integer", isinstance(hint, int))
            typical = int(str(hint)).bit_length() if is_number else None
            self.lines.append(f"{name} in {bounds} about 2**{typical}")
