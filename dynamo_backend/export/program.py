"""A program of ``torch.export`` as the ATen graph that is compiled: taken apart by the backend's own decompositions,
with its weights as inputs and its state written in place."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._prims_common import is_contiguous_or_false
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from ...ir.expr.value import symbol
from ..aten_passes.write import NodeWriter
from ..importing.decompositions import whole_ops
from ..importing.regions import attribute, regions_of
from ..tracing.origins import origins_of
from .decompositions import export_decompositions
from .errors import ExportError, Unsupported, refuse
from .names import result_names
from .served import served_sizes

aten = torch.ops.aten
# Sizes that data decide.
_OF_DATA = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
# Where torch's own lines are.
_TORCH = f'File "{Path(torch.__file__).parent}{os.sep}'
# Lines that are nobody's: torch's own, and those of graphs that it has written out as Python.
_THEIRS = (_TORCH, 'File "<eval_with_key>')
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """A value of the signature that is no tensor: a number, a text, or None."""

    value: Any


@dataclass(slots=True)
class ModelProgram:
    """One function. The graph's inputs are those of ``inputs`` and ``weights``, by the names of their placeholders.

    ``arguments`` and ``values`` are the leaves of what is called and returned, each the name of a tensor or a constant,
    laid out by ``in_spec`` and ``out_spec``; ``weights`` gives the model's names of parameters, buffers and constants,
    ``tensors`` has these by those names, and ``written`` are those that calls write to. ``conditions`` are what the
    program asserts of its sizes, beside the ``ranges`` that they have.
    """

    name: str
    gm: fx.GraphModule
    inputs: tuple[str, ...]
    weights: dict[str, str]
    tensors: dict[str, Tensor] = field(repr=False)
    written: frozenset[str]
    arguments: tuple[str | ConstantLeaf, ...]
    values: tuple[str | ConstantLeaf, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]
    conditions: list[sympy.Basic]
    parameters: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the tensors that it returns, in order."""
        return tuple(v for v in self.values if isinstance(v, str))


def read_program(name: str, program: ExportedProgram) -> ModelProgram:
    """The graph of a program of ``torch.export``. Raises ExportError for a signature that a library cannot have."""
    program = _decomposed(name, program)
    gm, signature = program.graph_module, program.graph_signature
    _keep_users_lines(gm)
    nodes = {n.name: n for n in gm.graph.find_nodes(op="placeholder")}
    weights: dict[str, str] = {}
    arguments: list[str | ConstantLeaf] = []
    refusals: list[Unsupported] = []
    for spec in signature.input_specs:
        match spec.kind, spec.arg:
            case kind, TensorArgument(name=given) if kind in _WEIGHTS:
                weights[given] = str(spec.target)
            case InputKind.USER_INPUT, TensorArgument(name=given):
                arguments.append(given)
            case InputKind.USER_INPUT, ConstantArgument(name=given, value=value):
                arguments.append(ConstantLeaf(value))
                if given in nodes and not nodes[given].users:
                    gm.graph.erase_node(nodes.pop(given))
            case _:
                what = type(spec.arg).__name__.removesuffix("Argument")
                mend = "give a tensor in its place, or let torch.export take it for a constant"
                refusals.append(Unsupported(f"the input {spec.arg.name}", "", f"it is a {what}, and no tensor", mend))
    values, kept = _results(gm, signature, refusals)
    # Passes take copies over inputs for the last things that a graph does.
    written = _write_state(gm, signature, weights, nodes)
    _give(gm, kept)
    refuse(name, refusals)
    inputs = tuple(a for a in arguments if isinstance(a, str))
    _lift_constants(gm, weights, tensors := _tensors(program, weights))
    env = _shape_env(gm)
    ranges = _set_ranges(env, program.range_constraints)
    conditions = _take_assertions(gm) + [g.expr for g in (env.guards if env is not None else ())]
    conditions += served_sizes(gm, ranges, conditions, _hints(env))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
    assert in_spec is not None and out_spec is not None
    named = iter(result_names(out_spec))
    answers = tuple(n if isinstance(v, fx.Node) else ConstantLeaf(v) for v, n in zip(values, named, strict=True))
    first = program.module_call_graph[0].signature
    parameters = tuple(first.forward_arg_names or ()) if first is not None else ()
    return ModelProgram(
        name, gm, inputs, weights, tensors, frozenset(written), tuple(arguments), answers, in_spec, out_spec, ranges,
        [_ours(c) for c in conditions], parameters,
    )  # fmt: skip


def _keep_users_lines(gm: fx.GraphModule, around: str = "") -> None:
    """Let nodes tell of the innermost line that is not torch's own, as those of Dynamo's graphs do; those of bodies of
    control flow that know none, of the line ``around`` them."""
    for node in gm.graph.nodes:
        trace = node.meta.get("stack_trace") or ""
        if any(theirs in trace for theirs in _THEIRS):
            frames = re.split(r'(?m)^(?=  File ")', trace)
            while frames and any(theirs in frames[-1] for theirs in _THEIRS):
                frames.pop()
            trace = "".join(frames) if any("File" in f for f in frames) else ""
        if trace or around:
            node.meta["stack_trace"] = trace or around
        elif "stack_trace" in node.meta:
            node.meta["stack_trace"] = ""
    reads = {n.name: n for n in gm.graph.find_nodes(op="get_attr")}
    for name, body in regions_of(gm).items():
        (first, *_) = reads[name].users
        _keep_users_lines(body, first.meta.get("stack_trace") or around)


def _decomposed(name: str, program: ExportedProgram) -> ExportedProgram:
    try:
        with whole_ops():
            return program.run_decompositions(export_decompositions())
    except AssertionError as error:  # torch's own passes take no state that overlaps
        weights = {**program.constants, **program.state_dict}
        storages: dict[int, list[str]] = {}
        for given, value in weights.items():
            if isinstance(value, Tensor):
                storages.setdefault(value.untyped_storage()._cdata, []).append(given)
        together = [" and ".join(names) for names in storages.values() if len(names) > 1]
        told = (
            f"; {', '.join(together)} lie in the same memory: let the model have one tensor and view it"
            if together
            else ""
        )
        raise ExportError(f"torch.export cannot take {name} apart: {error}{told}") from error


def _tensors(program: ExportedProgram, weights: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of the model by its own names."""
    known = {**program.constants, **program.state_dict}
    return {name: known[name].detach() for name in weights.values()}


def _write_state(
    gm: fx.GraphModule, signature: Any, weights: Mapping[str, str], nodes: Mapping[str, fx.Node]
) -> set[str]:
    """Let the graph copy what state and inputs become over what they were, at its end; the state that is written."""
    (end,) = gm.graph.find_nodes(op="output")
    made = dict(zip((s.arg.name for s in signature.output_specs), end.args[0], strict=True))
    placeholders = {target: given for given, target in weights.items()}
    written: set[str] = set()
    for spec in signature.output_specs:
        if spec.kind not in _MUTATIONS:
            continue
        mine = spec.kind is not OutputKind.USER_INPUT_MUTATION
        target = nodes[placeholders[spec.target] if mine else spec.target]
        value = made[spec.arg.name]
        if mine:
            written.add(spec.target)
        if value is target:
            continue
        with gm.graph.inserting_before(end):
            NodeWriter(gm.graph, value).call(aten.copy_.default, target, value)
    return written


def _results(gm: fx.GraphModule, signature: Any, refusals: list[Unsupported]) -> tuple[list[Any], list[fx.Node]]:
    """What is returned, leaf by leaf, and of that the nodes of tensors, each dense and row-major."""
    (end,) = gm.graph.find_nodes(op="output")
    leaves: list[Any] = []
    for spec, value in zip(signature.output_specs, end.args[0], strict=True):
        if spec.kind in _MUTATIONS:
            continue
        match spec.kind, spec.arg:
            case OutputKind.USER_OUTPUT, TensorArgument():
                leaves.append(_row_major(gm, value, end))
            case OutputKind.USER_OUTPUT, ConstantArgument(value=constant):
                leaves.append(constant)
            case _:
                what = type(spec.arg).__name__.removesuffix("Argument")
                line = origins_of(value, "")[0].source if isinstance(value, fx.Node) else ""
                mend = "return a tensor of it, or what it is computed of"
                refusals.append(
                    Unsupported(f"the result {spec.arg.name}", line, f"it is a {what}, and no tensor", mend)
                )
    return leaves, [v for v in leaves if isinstance(v, fx.Node)]


def _row_major(gm: fx.GraphModule, value: fx.Node, end: fx.Node) -> fx.Node:
    if is_contiguous_or_false(value.meta["val"]):
        return value
    with gm.graph.inserting_before(end):
        return NodeWriter(gm.graph, value).call(aten.clone.default, value, memory_format=torch.contiguous_format)


def _give(gm: fx.GraphModule, values: Sequence[fx.Node]) -> None:
    (end,) = gm.graph.find_nodes(op="output")
    end.args = (tuple(values),)


def _lift_constants(gm: fx.GraphModule, weights: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Let tensors that the graph holds itself be weights, but for single numbers."""
    for node in list(gm.graph.find_nodes(op="get_attr")):
        value = attribute(gm, str(node.target))
        if not isinstance(value, Tensor) or value.numel() == 1:
            continue
        name = next(
            n for n in (str(node.target), *(f"{node.target}_{k}" for k in range(len(tensors) + 1))) if n not in tensors
        )
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            given = gm.graph.placeholder(f"c_{node.name}")
        given.meta.update(node.meta)
        node.replace_all_uses_with(given)
        gm.graph.erase_node(node)
        weights[given.name], tensors[name] = name, value.detach()


# --- sizes ------------------------------------------------------------------------------------------------------------


def _shape_env(gm: fx.GraphModule) -> Any:
    for node in gm.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            mode = getattr(value, "fake_mode", None)
            if mode is not None and mode.shape_env is not None:
                return mode.shape_env
    return None


def _set_ranges(env: Any, constraints: Mapping[Any, Any]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Let code be made for all sizes that the program allows: torch traces it as if none were 0 or 1."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for theirs, bounds in constraints.items():
        if isinstance(theirs, sympy.Symbol) and bounds.lower.is_Integer:  # numbers that data decide have no least one
            found[theirs] = max(int(bounds.lower), 0), _finite(bounds.upper)
    for expr, bounds in constraints.items():  # a dimension that is a number of times a size tells more of that
        (theirs,) = expr.free_symbols if len(expr.free_symbols) == 1 else (None,)
        if isinstance(expr, sympy.Symbol) or theirs not in found:
            continue
        shift = expr.xreplace({theirs: sympy.S.Zero})
        scale = sympy.expand(expr - shift).coeff(theirs)
        if scale.is_Integer and shift.is_Integer and scale > 0 and sympy.expand(scale * theirs + shift - expr) == 0:
            low, high = found[theirs]
            found[theirs] = min(low, max(-((shift - int(bounds.lower)) // scale), 0)), high
    for theirs, (low, high) in found.items():
        if env is not None and theirs in env.var_to_range:
            env.var_to_range[theirs] = ValueRanges(low, int_oo if high is None else high)
    return {symbol(theirs.name): (int(low), high) for theirs, (low, high) in found.items()}


def _hints(env: Any) -> Mapping[Any, Any]:
    """Typical values of torch's symbols."""
    name = "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    return getattr(env, name, None) or {}


def _finite(bound: Any) -> int | None:
    return int(bound) if bound.is_Integer and bound < (1 << 62) else None


def _take_assertions(gm: fx.GraphModule) -> list[sympy.Basic]:
    """What the graph asserts of sizes that its inputs have, which is looked at before it runs."""
    found = []
    for node in list(gm.graph.find_nodes(op="call_function", target=aten._assert_scalar.default)):
        said = node.args[0]
        value = said.meta.get("val") if isinstance(said, fx.Node) else said
        if isinstance(value, torch.SymBool):
            expr = value.node.expr
            if any(symbol_is_type(s, _OF_DATA) for s in expr.free_symbols):
                continue  # data decide it
            found.append(expr)
        gm.graph.erase_node(node)
    for inside in (gm, *regions_of(gm).values()):
        for node in list(inside.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default)):
            inside.graph.erase_node(node)  # element types do not vary
    for node in reversed(list(gm.graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and getattr(node.target, "__module__", "") == operator.__name__
        ):
            gm.graph.erase_node(node)
    return found


def _ours(theirs: sympy.Basic) -> sympy.Basic:
    return theirs.xreplace({s: symbol(s.name) for s in theirs.free_symbols})  # type: ignore[attr-defined]
