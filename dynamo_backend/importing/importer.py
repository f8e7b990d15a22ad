"""ATen FX graphs, as AOTAutograd makes them, into graphs of the IR.

Each call is given to the converter of its op; without one, or where the converter declines, it becomes a library call
of that very op. Sizes become sympy expressions, and no guard is ever installed.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from ...ir.errors import MlcError
from ...ir.expr.dtypes import DType
from ...ir.expr.size_regions import ANYWHERE, SizeRegion
from ...ir.expr.value import const
from ...ir.graph.effects import KEPT_OP
from ...ir.graph.graph import (
    CONSTANT,
    ArgumentRef,
    Constant,
    ConstantRef,
    Graph,
    GraphInput,
    GraphOutput,
    Input,
    Library,
    OpRef,
    Ref,
    SizeInput,
    TensorType,
)
from ...ir.target import TargetOf, has_kernels, usual_target
from ...scheduler.decisions import Decider
from ...scheduler.numerics import OP, Numerics
from ..aten_passes.views.negations import BIT, NEGATE, WHY_BIT, is_negated, negate, negative, write_negated
from ..aten_passes.views.written_arguments import places_in_bases
from ..converters import CONVERTERS, LIBRARY_REASONS, ImportContext, NoConversion, SizeMap, Tensor
from ..converters.context import KEEPS, KEEPS_ROUNDING
from ..converters.random.replays import REPLAY, SAVE, replayed_value
from ..converters.refused_types import refused_call
from ..converters.sizes import SYMBOLIC
from ..tracing.origins import origins_of
from ..tracing.tokens import is_token
from .decided import Decided, is_settled
from .flex_attention import decompose_flex_attention
from .regions import attribute

# Whose results behind the first are positions and counts.
_POSITIONS = (
    torch.ops.aten._unique2.default, torch.ops.aten.unique_dim.default, torch.ops.aten.unique_consecutive.default,
)  # fmt: skip
_NOTHING: Mapping[fx.Node, fx.Node | None] = {}


class ImportFailure(MlcError):
    """A graph holds something that neither a node of the IR nor a library call can stand for."""


def import_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    fallback_random: bool = False,
    numerics: Numerics = "fast",
    libraries: bool = True,
    static: Collection[int] = (),
    name: str = "main",
    skipped: Mapping[fx.Node, fx.Node | None] = _NOTHING,
    called_after: dict[str, str] | None = None,
    decider: Decider | None = None,
    region: SizeRegion = ANYWHERE,
    target_of: TargetOf = usual_target,
) -> Graph:
    """The IR of an ATen graph.

    ``example_inputs`` stand in for placeholders whose ``meta["val"]`` is missing. ``static`` holds the positions of
    the inputs that are parameters or buffers. ``fallback_random`` leaves random ops to ATen (eager's own numbers);
    ``numerics`` are as ``Options`` has them; without ``libraries`` kernels compute on CPUs all that they can.
    ``skipped`` nodes, inputs and outputs among them, are left out; what reads one reads the node that it is mapped to.
    ``called_after`` is filled with the node of each name that is made here and is no node's own. ``decider`` is asked
    where costs decide what an op becomes, by the machine that ``target_of`` gives for a device. The graph is for the
    sizes of a ``region``. Raises ImportFailure.
    """
    decomposed = decompose_flex_attention(gm)
    importer = _Importer(
        decomposed, example_inputs, fallback_random, numerics, libraries, frozenset(static), skipped, decider, region,
        target_of,
    )  # fmt: skip
    graph = importer.run(name)
    if called_after is not None:
        called_after.update(importer.ctx.called_after)
    return graph


@dataclass(frozen=True, slots=True)
class _Constant:
    """A value of the import that is no tensor and no size."""

    name: str


@dataclass(frozen=True, slots=True)
class _OtherInput:
    """An input of the graph that is no tensor and no size."""

    name: str


class _Values(dict[fx.Node, Any]):
    """What each node became; of one that is left out, what its twin became."""

    def __init__(self, twins: Mapping[fx.Node, fx.Node | None]) -> None:
        super().__init__()
        self.twins = twins

    def __missing__(self, node: fx.Node) -> Any:
        twin = self.twins[node]
        assert twin is not None, f"{node} is left out, and nothing stands for it"
        return self[twin]


def _foreign(val: Any) -> str | None:
    """Why no kernel can produce these results, or None."""
    for v in val if isinstance(val, (list, tuple)) else (val,):
        if isinstance(v, torch.Tensor):
            if DType.from_torch(v.dtype).is_carried:
                return "complex numbers" if v.is_complex() else f"elements of {v.dtype}"
            if not has_kernels(v.device.type):
                return f"device {v.device.type}"
    return None


def _mistyped_positions(node: fx.Node) -> torch.dtype | None:
    """What torch's fake tensors (those of 2.11) take positions and counts for that somebody reads, if not integers."""
    if node.target not in _POSITIONS:
        return None
    read = (u for u in node.users if u.target is operator.getitem and u.args[1] != 0)
    return next((u.meta["val"].dtype for u in read if u.meta["val"].dtype is not torch.int64), None)


def _full_name(op: OpOverload | HigherOrderOperator) -> str:
    if isinstance(op, HigherOrderOperator):
        return f"hop::{op.name()}"
    return f"{op.namespace}::{op._opname}.{op._overloadname}"


class _Importer:
    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        fallback_random: bool,
        numerics: Numerics,
        libraries: bool,
        static: frozenset[int],
        skipped: Mapping[fx.Node, fx.Node | None] = _NOTHING,
        decider: Decider | None = None,
        region: SizeRegion = ANYWHERE,
        target_of: TargetOf = usual_target,
    ) -> None:
        self.gm = gm
        self.places = {n: k for k, n in enumerate(gm.graph.nodes)}
        self.positions = {n: k for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self.examples = examples
        self.static = static
        names = {n.name for n in gm.graph.nodes}
        self.sizes = SizeMap(names, region)
        self.ctx = ImportContext(
            names, self.sizes, fallback_random=fallback_random, numerics=numerics, libraries=libraries,
            bodies=self.body, decider=decider, target_of=target_of,
        )  # fmt: skip
        self.env = _Values(skipped)
        self.inputs: list[GraphInput] = []
        self.outputs: tuple[GraphOutput, ...] = ()
        self.constants: dict[str, Constant] = {}
        # Sizes decided by data that the caller or a node of the graph gives.
        self.decided = Decided(self.sizes)

    def run(self, name: str) -> Graph:
        for node in self.gm.graph.nodes:
            if node in self.env.twins:
                continue
            match node.op:
                case "placeholder":
                    self.env[node] = self.placeholder(node)
                case "get_attr":
                    self.env[node] = self.attribute(node)
                case "call_function":
                    self.env[node] = self.call(node)
                case "output":
                    outputs = self.flat_outputs(node)
                    left = [v for v in outputs if not (isinstance(v, fx.Node) and v in self.env.twins)]
                    self.outputs = tuple(self.output(v) for v in left)
                case _:
                    raise ImportFailure(
                        f"{node.op} of {node.target} in an ATen graph; expected the functional graph of AOTAutograd"
                    )
        seeds = tuple(self.seeds(device, len(users)) for device, users in self.ctx.seeds.items())
        order = [s for i in self.inputs if isinstance(i, SizeInput) for s in i.value.free_symbols]
        return Graph(
            name,
            tuple(self.inputs),
            (*seeds, *self.sizes.with_made(self.inputs, self.ctx.nodes)),
            self.outputs,
            self.sizes.table(order),
            self.constants,
        )

    def body(self, node: fx.Node) -> Graph:
        """The graph of a function that a node of this one names."""
        body = attribute(self.gm, str(node.target))
        libraries = self.ctx.calls_libraries("cpu")
        return import_graph(
            body, numerics=self.ctx.given_numerics, libraries=libraries, name=node.name, target_of=self.ctx.target_of
        )

    # --- the ends of the graph --------------------------------------------------------------------------------------

    def placeholder(self, node: fx.Node) -> Any:
        position = self.positions[node]
        val = node.meta.get("val")
        if val is None and position < len(self.examples):
            val = self.examples[position]
        if isinstance(val, torch.Tensor) and not is_token(node):
            kind = self.sizes.tensor_type(val)
            self.inputs.append(Input(node.name, kind, position in self.static))
            self.decided.tell((*kind.shape, *kind.strides))
            if not is_negated(node):
                return Tensor(node.name, kind)
            self.ctx.enter(node, origins_of(node, "negated", self.places[node]))
            return negative(self.ctx, Tensor(node.name, kind), self.ctx.fresh("negated"), val)
        if isinstance(val, (int, *SYMBOLIC)):
            told = self.sizes.argument(val)
            self.inputs.append(SizeInput(node.name, told))
            self.decided.tell((told,))
            return self.sizes.size(val)
        if val is None and not node.users:
            self.inputs.append(SizeInput(node.name, sympy.S.Zero))
            return None
        if isinstance(val, (torch.ScriptObject, FakeScriptObject)) or is_token(node):
            self.inputs.append(SizeInput(node.name, sympy.S.Zero))
            return _OtherInput(node.name)
        raise ImportFailure(
            f"input {position} ({node.name}) is a {type(val).__name__}; tensors and sizes can be inputs"
        )

    def attribute(self, node: fx.Node) -> Any:
        value = attribute(self.gm, str(node.target))
        if not isinstance(value, torch.Tensor):
            self.constants[node.name] = Constant.of(value)
            return _Constant(node.name)
        value = value.resolve_neg()
        val = node.meta.get("val")
        kind = self.sizes.tensor_type(value if val is None else val)
        self.ctx.enter(node, origins_of(node, "constant", self.places[node]))
        if value.numel() == 1 and not kind.dtype.is_carried and type(value) in (torch.Tensor, torch.nn.Parameter):
            scalar = value.detach().reshape(()).item()
            return self.ctx.compute(const(scalar, kind.dtype.compute), kind)
        self.constants[node.name] = Constant.of(value, kind)
        self.ctx.nodes.append(
            Library((node.name,), (kind,), CONSTANT, (node.name,), (), "constant of the module", self.ctx.origins)
        )
        return Tensor(node.name, kind)

    def flat_outputs(self, node: fx.Node) -> Sequence[Any]:
        values = node.args[0]
        return values if isinstance(values, (list, tuple)) else (values,)

    def output(self, value: Any) -> GraphOutput:
        found = self.env[value] if isinstance(value, fx.Node) else value
        match found:
            case Tensor() | _OtherInput():
                return found.name
            case None:
                return None
            case int() | float() | sympy.Basic():
                return self.sizes.size(found)
        raise ImportFailure(
            f"an output of the graph is a {type(found).__name__}; tensors, sizes and None can be outputs"
        )

    def seeds(self, device: str, count: int) -> Library:
        name = ImportContext.seeds_name(device)
        kind = TensorType((sympy.Integer(count),), (sympy.S.One,), DType.INT64, device)
        return Library((name,), (kind,), "mlc::seeds", (count, torch.device(device)), (), "random seeds")

    # --- calls --------------------------------------------------------------------------------------------------------

    def call(self, node: fx.Node) -> Any:
        target = node.target
        if target is operator.getitem:
            return self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        if "val" not in node.meta and isinstance(target, HigherOrderOperator) and target.name() in (SAVE, REPLAY):
            node.meta["val"] = replayed_value(node)
        val = node.meta.get("val")
        is_op = isinstance(target, OpOverload)
        if isinstance(val, SYMBOLIC) and not node.meta.get("unbacked_bindings"):
            if not (is_op and self.decided.is_new(self.sizes.told(val))):
                return self.sizes.size(val)
        if isinstance(val, (list, tuple)) and val and all(isinstance(v, (int, *SYMBOLIC)) for v in val):
            return [self.sizes.size(v) for v in val]
        if not is_op and not isinstance(target, HigherOrderOperator):
            if isinstance(val, (int, float, bool)):
                return val
            if node.is_impure() and not node.users:
                return None
        op = str(target) if is_op else f"hop.{target}"
        self.ctx.enter(node, origins_of(node, op, self.places[node]))
        if target is NEGATE:
            return negate(self.ctx, node, self.lookup(node.args[0]))
        if target is torch.ops.aten.copy_.default and is_negated(node.args[0]):
            destination, source = node.args[:2]
            return write_negated(self.ctx, destination, self.lookup(source), source.meta["val"])
        convert = CONVERTERS.get(op)
        reason = LIBRARY_REASONS.get(op) or f"no converter for {op}"
        if convert is not None:
            mark = len(self.ctx.nodes)
            try:
                if (refused := _foreign(val)) is not None:
                    raise NoConversion(refused)
                if OP in node.meta.get(KEEPS, ()):
                    raise NoConversion("numerics: eager's own op is kept here")
                if node.meta.get(BIT):
                    raise NoConversion(WHY_BIT)
                if (kind := refused_call(node)) is not None:
                    raise NoConversion(f"eager has no kernel for {kind}")
                if isinstance(val, torch.Tensor) and node.meta.get("unbacked_bindings"):
                    raise NoConversion("a size decided by data")
                args = [self.lookup(a) for a in node.args]
                for a in args:
                    if isinstance(a, Tensor) and a.dtype.is_carried:
                        raise NoConversion("complex numbers" if a.dtype.is_complex else f"elements of {a.dtype!r}")
                return convert(self.ctx, *args, **{k: self.lookup(v) for k, v in node.kwargs.items()})
            except NoConversion as decline:
                self.ctx.undo(mark)
                reason = str(decline)
        note = node.meta.get("mlc_note")
        return self.library(node, val, f"{reason}; {note}" if note else reason)

    def library(self, node: fx.Node, val: Any, reason: str) -> Any:
        target = node.target
        if isinstance(target, OpOverload) and not node.users and not target._schema.returns:
            if is_settled(node, [self.lookup(a) for a in node.args], self.sizes):
                return None
        if isinstance(target, (OpOverload, HigherOrderOperator)):
            full_name = _full_name(target)
            if OP in node.meta.get(KEEPS, ()):
                full_name = f"{KEPT_OP}::{full_name.partition('::')[2]}"
        else:
            full_name = f"{getattr(target, '__module__', '')}::{getattr(target, '__name__', target)}"
            self.constants.setdefault(full_name, Constant.of(target))
        if (mistyped := _mistyped_positions(node)) is not None:
            where = f" at {self.ctx.origins[0].source}" if self.ctx.origins else ""
            raise ImportFailure(
                f"{target}{where}: torch's fake tensors say that the positions it gives are {mistyped}, and they are "
                "torch.int64, so what is made of them would be wrong: use a torch whose fake tensors know it (2.13 "
                "does), or keep the call out of the graph with torch.compiler.disable"
            )
        multiple = isinstance(val, (list, tuple, dict))
        names: list[str] = []
        types: list[TensorType | None] = []
        results: list[Any] = []
        held: list[Library] = []

        def result(v: Any, suffix: str) -> Any:
            """What stands for one result; results in lists inside of others count one after the other."""
            if isinstance(v, (list, tuple)):
                return tuple(result(x, f"{suffix}_{k}".lstrip("_")) for k, x in enumerate(v))
            if isinstance(v, dict):
                return {k: result(x, f"{suffix}_{k}".lstrip("_")) for k, x in v.items()}
            name = self.ctx.fresh(suffix) if multiple else node.name
            kind: TensorType | None = None
            found: Any = None if v is None else _Constant(name)
            if isinstance(v, torch.Tensor):
                kind = self.sizes.tensor_type(v)
                found = Tensor(name, kind)
            elif isinstance(v, SYMBOLIC):
                found = self.sizes.size(v)
                # A result of no tensor type that is named like a size symbol binds that symbol.
                bound = self.decided.given(v, bool(node.meta.get("unbacked_bindings")))
                if bound is not None:
                    name = bound.name
                    held.extend(self.decided.held(bound, found, full_name, self.ctx.origins))
            names.append(name)
            types.append(kind)
            results.append(found)
            return found

        answer = result(val, "")
        kwargs = {k: self.argument(v) for k, v in node.kwargs.items()}
        bases = [b.meta["val"] if isinstance(b, fx.Node) else b for b in node.kwargs.get("_all_bases", ())]
        self.ctx.nodes.append(
            Library(
                tuple(names),
                tuple(types),
                full_name,
                tuple(self.argument(a) for a in node.args),
                tuple(places_in_bases(full_name, kwargs, bases, self.sizes).items()),
                reason,
                self.ctx.origins,
                bool(node.meta.get(KEEPS_ROUNDING)) or OP in node.meta.get(KEEPS, ()),
                refused_call(node) is not None,
            )
        )
        for value, found in zip(pytree.tree_leaves(val), results):
            if isinstance(found, Tensor):
                self.ctx.nodes += self.decided.read(value, found, self.ctx.origins)
        self.ctx.nodes += held
        return answer

    def lookup(self, arg: Any) -> Any:
        """A node argument as converters see it."""
        if isinstance(arg, fx.Node):
            return self.env[arg]
        if isinstance(arg, (list, tuple)):
            return [self.lookup(a) for a in arg]
        return arg

    def argument(self, arg: Any) -> Any:
        """A node argument as library calls hold it: ``Ref`` for tensors, tuples for lists."""
        match arg:
            case fx.Node():
                return self.argument(self.env[arg])
            case Tensor():
                return Ref(arg.name)
            case list() | tuple():
                return tuple(self.argument(a) for a in arg)
            case slice():
                return slice(*(self.argument(a) for a in (arg.start, arg.stop, arg.step)))
            case dict():
                return {k: self.argument(v) for k, v in arg.items()}
            case OpOverload() | HigherOrderOperator():
                return OpRef(_full_name(arg))
            case _Constant():
                return ConstantRef(arg.name)
            case _OtherInput():
                return ArgumentRef(arg.name)
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return self.sizes.size(arg)
            case sympy.Basic() | torch.dtype() | torch.device() | torch.layout() | torch.memory_format():
                return arg
            case bool() | int() | float() | complex() | str() | None:
                return arg
            case _:
                name = self.ctx.fresh("constant")
                self.constants[name] = Constant.of(arg)
                return ConstantRef(name)
