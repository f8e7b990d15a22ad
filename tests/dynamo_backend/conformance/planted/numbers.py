"""Wrong numbers: types, NaN, bits of conjugate and negative views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .planting import Run, changed, compiled_as, found_by, of_floats


@found_by("numbers::nan_goes_through", "numbers::infinities", "numbers::masked_rows")
def cleans_nan(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: of_floats(compiled(*arguments), torch.nan_to_num))


def _through(dtype: torch.dtype, of: torch.dtype) -> Callable[..., Run]:
    """Every value of a type goes through another one."""

    class Cast(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            return torch.utils._pytree.tree_map_only(
                Tensor, lambda t: t.to(dtype).to(of) if t.dtype == of else t, super().run_node(n)
            )

    return compiled_as(lambda g, i: Cast(g).run)


@found_by("numbers::large_integers")
def integers_through_floats(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    return _through(torch.float64, torch.int64)(gm, inputs)


@found_by("numbers::double_precision")
def doubles_through_floats(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    return _through(torch.float32, torch.float64)(gm, inputs)


@found_by("numbers::overflow")
def saturates(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """Adds and multiplies small integers in a wide type, and clamps."""

    class Saturating(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and n.target in (torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor):
                if result.dtype in (torch.int8, torch.uint8, torch.int32):
                    args = [self.env[a].long() if isinstance(a, fx.Node) else a for a in n.args]
                    limits = torch.iinfo(result.dtype)
                    return n.target(*args).clamp(limits.min, limits.max).to(result.dtype)  # type: ignore[operator]
            return result

    return compiled_as(lambda g, i: Saturating(g).run)(gm, inputs)


@found_by("numbers::promotion")
def everything_is_float32(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: of_floats(compiled(*arguments), Tensor.float))


def _physical(a: Any) -> Any:
    if isinstance(a, Tensor) and a.is_conj():
        return a.conj()
    if isinstance(a, Tensor) and a.is_neg():
        return torch._neg_view(a)
    return a


@found_by("complex_numbers::conjugate_input", "complex_numbers::negative_input")
def ignores_the_bits_of_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Reads the memory of a conjugate, or negative, tensor as it stands."""
    return changed(gm, inputs, lambda compiled, arguments: compiled(*map(_physical, arguments)))


@found_by("complex_numbers::conjugate_result")
def resolves_results(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Gives the conjugate as memory of its own."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        return tuple(r.resolve_conj() if isinstance(r, Tensor) else r for r in compiled(*arguments))

    return changed(gm, inputs, run)
