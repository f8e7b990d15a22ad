"""Where the arguments lie that an op of the user's writes to.

AOTAutograd hands such an op the tensors that its arguments are views of, the bases, and tells which view each argument
is by a place in the base's storage. That is the storage of tracing: it begins where the fake base has it, behind as
many elements as the base has in front of it. The real base may lie elsewhere in its own storage, since Dynamo guards
no offset, and values that the graph makes have a storage of their own. Here places are told from the base's first
element on, which holds for every base of the type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch._higher_order_ops import auto_functionalize
from torch._subclasses.functional_tensor import FunctionalTensor

from ....codegen.host.build import MUTATES
from ...tracing.substitution import Substitution

_WRITE_VIEWS = auto_functionalize.write_view_information_to_args
_BASE, _PLACE = "_base_index", "_storage_offset"
_TOLD = ("_alias", "_slice_dim", "_slice_start", "_slice_end", "_size", "_stride", _PLACE)


def views_as_they_are() -> AbstractContextManager[None]:
    """While AOTAutograd traces inside, an argument that is written to is told as the view that it is by then.

    torch goes by what it knows of argument and base from when they were made: after a write to a part of the base,
    an argument is still told as a view of the storage that the base had before. And it tells a slice by its place in
    the storage, which is not its place in the base where that begins elsewhere.
    """
    return _AS_THEY_ARE.here()


def _write_views(names: list[str], types: list[Any], kwargs: dict[str, Any], *args: Any) -> None:
    _WRITE_VIEWS(names, types, kwargs, *args)
    for name in names:
        given = kwargs[name]
        if isinstance(given, (list, tuple)):
            for k, tensor in enumerate(given):
                _tell(kwargs, f"_{name}_{k}", tensor)
        else:
            _tell(kwargs, f"_{name}", given)


def _tell(kwargs: dict[str, Any], prefix: str, tensor: Any) -> None:
    """Say of one argument which view of its base it is, if it is one."""
    base = auto_functionalize.get_base(tensor) if isinstance(tensor, FunctionalTensor) else None
    if not isinstance(base, FunctionalTensor):
        return
    for end in _TOLD:
        kwargs.pop(prefix + end, None)
    view, whole = (FunctionalTensor.from_functional(t) for t in (tensor, base))
    if auto_functionalize.is_alias(whole, view):
        kwargs[f"{prefix}_alias"] = True
    else:
        kwargs.update({f"{prefix}_size": view.size(), f"{prefix}_stride": view.stride()})
        kwargs[prefix + _PLACE] = view.storage_offset()


_AS_THEY_ARE = Substitution(auto_functionalize, _WRITE_VIEWS.__name__, _write_views)


def places_in_bases(target: str, kwargs: Mapping[str, Any], bases: Sequence[Any], sizes: Any) -> dict[str, Any]:
    """The keyword arguments of a library call of ``target``; of one that writes to views of ``bases``, fake tensors,
    with every place counted in elements from the first one of the base.

    ``sizes`` gives the sizes of fake tensors as expressions.
    """
    told = dict(kwargs)
    if target == MUTATES:
        for prefix in [k.removesuffix(_PLACE) for k in kwargs if k.startswith("_") and k.endswith(_PLACE)]:
            told[prefix + _PLACE] -= sizes.size(bases[told[prefix + _BASE]].storage_offset())
    return told
