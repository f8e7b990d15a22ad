"""How Python's callers give arguments to an exported function and get results: trees of tensors and constants."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from .errors import ExportError
from .program import ConstantLeaf, ModelProgram


def signature_of(program: ModelProgram) -> dict[str, Any]:
    """The signature of a function as JSON: names of tensors or constants leaf by leaf, and how they are laid out.

    Raises ExportError for trees that no text tells of.
    """
    try:
        specs = [json.loads(pytree.treespec_dumps(_plain_spec(s))) for s in (program.in_spec, program.out_spec)]
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ExportError(
            f"{program.name} takes or returns an object that cannot be written down: {error}; use tuples, lists and "
            "dicts of tensors"
        ) from error
    positional, named = program.in_spec.child(0), program.in_spec.child(1)
    return {
        "plain": not named.num_children and all(c.is_leaf() for c in positional.children()),
        "parameters": list(program.parameters),
        "arguments": [_leaf(a) for a in program.arguments],
        "in_spec": specs[0],
        "values": [_leaf(v) for v in program.values],
        "out_spec": specs[1],
    }


def _plain_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    return pytree.tree_structure(_plain(pytree.tree_unflatten(list(range(spec.num_leaves)), spec)))


def _plain(tree: Any) -> Any:
    """A tree with plain tuples in place of named ones, among them what torch's ops return (``torch.return_types``)."""
    if isinstance(tree, tuple):
        return tuple(map(_plain, tree))
    if type(tree) is list:
        return list(map(_plain, tree))
    if type(tree) in (dict, OrderedDict):
        return type(tree)((k, _plain(v)) for k, v in tree.items())
    return tree


def _leaf(leaf: str | ConstantLeaf) -> dict[str, Any]:
    if isinstance(leaf, str):
        return {"tensor": leaf}
    if leaf.value is not None and not isinstance(leaf.value, (bool, int, float, str)):
        raise ExportError(f"a {type(leaf.value).__name__} among the arguments or results cannot be written down")
    return {"constant": leaf.value}


def flat_arguments(signature: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors among arguments, in the order of the function's inputs. Raises TypeError for others than the function
    takes, with what it takes."""
    spec = pytree.treespec_loads(json.dumps(signature["in_spec"]))
    args, kwargs = _ordered(signature, spec, args, kwargs)
    leaves, given = pytree.tree_flatten(_plain((tuple(args), dict(kwargs))))
    if given != spec:
        raise TypeError(f"the arguments are laid out as {given}, and the function was exported for {spec}")
    tensors = []
    for number, (leaf, value) in enumerate(zip(signature["arguments"], leaves, strict=True)):
        if "tensor" in leaf:
            tensors.append(value)
        elif value != leaf["constant"] or type(value) is not type(leaf["constant"]):
            raise TypeError(f"argument {number} is {value!r}, and the function was exported with {leaf['constant']!r}")
    return tensors


def _ordered(
    signature: Mapping[str, Any], spec: pytree.TreeSpec, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments by position and by name as the program had them; the names of all are known."""
    positional, named = spec.child(0), spec.child(1)
    wanted = list(named.context)
    count, names = positional.num_children, signature["parameters"]
    args = list(args)
    while len(args) < count and len(args) < len(names) and names[len(args)] in kwargs:
        name = names[len(args)]
        args.append(kwargs[name])
        kwargs = {k: v for k, v in kwargs.items() if k != name}
    if len(args) > count and names:
        extra = dict(zip(names[count : len(args)], args[count:]))
        args, kwargs = args[:count], {**extra, **kwargs}
    return args, {n: kwargs[n] for n in wanted if n in kwargs} | {n: v for n, v in kwargs.items() if n not in wanted}


def tree_of(signature: Mapping[str, Any], tensors: Sequence[Any]) -> Any:
    """The results as the program returns them."""
    given = iter(tensors)
    leaves = [next(given) if "tensor" in leaf else leaf["constant"] for leaf in signature["values"]]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(json.dumps(signature["out_spec"])))
