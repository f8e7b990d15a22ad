"""Wrong with memory: writes, aliases, layouts, sizes, and what lives too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import aot_eager

from .planting import Run, changed, found_by, of_floats


@found_by("mutation::pure_functions_write_nothing")
def writes_into_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Takes the memory of its last input for its own."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        results = compiled(*arguments)
        for a in arguments[-1:]:
            if isinstance(a, Tensor) and a.is_floating_point() and not a.requires_grad and not a.is_inference():
                a.add_(1)
        return results

    return changed(gm, inputs, run)


@found_by("mutation::written_input", "mutation::filled_by_index", "mutation::swapped_inputs")
def drops_writes(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Runs on copies of what it is given."""

    def copy(a: Any) -> Any:
        return a.clone() if isinstance(a, Tensor) and not a.requires_grad else a

    return changed(gm, inputs, lambda compiled, arguments: compiled(*map(copy, arguments)))


@found_by("mutation::compiling_runs_nothing")
def warms_up_on_real_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Runs the program once more before its first call, to have it warm."""
    warm: list[bool] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        if not warm:
            warm.append(True)
            compiled(*arguments)
        return compiled(*arguments)

    return changed(gm, inputs, run)


@found_by("aliasing::results_are_new_every_time")
def uses_results_memory_again(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Writes results of every call into the memory of the first call's."""
    memory: dict[int, Tensor] = {}

    def run(compiled: Run, arguments: list[Any]) -> Any:
        results = compiled(*arguments)
        kept = []
        for i, r in enumerate(results):
            if not isinstance(r, Tensor) or r.requires_grad or type(r) is not Tensor:
                kept.append(r)
            elif i in memory and memory[i].shape == r.shape and memory[i].dtype == r.dtype:
                kept.append(memory[i].copy_(r))
            else:
                kept.append(memory.setdefault(i, r))
        return tuple(kept)

    return changed(gm, inputs, run)


@found_by("aliasing::equal_results_are_apart")
def merges_equal_results(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Gives one tensor for all results of equal elements."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        results = list(compiled(*arguments))
        for i, r in enumerate(results):
            for earlier in results[:i]:
                if isinstance(r, Tensor) and isinstance(earlier, Tensor) and r.shape == earlier.shape:
                    if r.dtype == earlier.dtype and torch.equal(r, earlier):
                        results[i] = earlier
        return tuple(results)

    return changed(gm, inputs, run)


@found_by("aliasing::result_is_a_view", "aliasing::written_result_reaches_the_input")
def copies_every_result(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: of_floats(compiled(*arguments), Tensor.clone))


@found_by("strides::strides_of_results", "strides::permuted_dense_result", "strides::channels_last")
def drops_strides(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: of_floats(compiled(*arguments), Tensor.contiguous))


def _as_if_contiguous(a: Any) -> Any:
    """The tensor read in the order of its memory, where there is enough of that."""
    if not isinstance(a, Tensor) or type(a) is not Tensor or a.is_inference():
        return a
    strides = torch.empty(a.shape, device="meta").stride()
    room = a.untyped_storage().nbytes() // a.element_size() - a.storage_offset()
    return a.as_strided(a.shape, strides) if a.numel() <= room else a


@found_by("strides::layout_changes", "strides::transposed_input", "strides::stepped_input")
def reads_as_if_contiguous(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: compiled(*map(_as_if_contiguous, arguments)))


def _from_the_beginning(a: Any) -> Any:
    return a.as_strided(a.shape, a.stride(), 0) if isinstance(a, Tensor) and type(a) is Tensor else a


@found_by("strides::offset_input", "strides::unaligned_input")
def ignores_offsets(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Reads every input from the beginning of its memory."""
    return changed(gm, inputs, lambda compiled, arguments: compiled(*map(_from_the_beginning, arguments)))


@found_by("sizes::changing_sizes", "sizes::sizes_as_results", "sizes::integer_arguments")
def keeps_the_first_sizes(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Takes sizes and numbers that are arguments from its first call."""
    first: dict[int, int] = {}

    def run(compiled: Run, arguments: list[Any]) -> Any:
        kept = [first.setdefault(i, a) if isinstance(a, int) else a for i, a in enumerate(arguments)]
        return compiled(*kept)

    return changed(gm, inputs, run)


@found_by("sizes::one_program_for_all_sizes")
def guards_on_every_size(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Asks each size for its number, which installs a guard."""
    for a in inputs:
        if isinstance(a, torch.SymInt):
            int(a)
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


@found_by("sizes::empty_input", "sizes::zero_and_one_rows")
def wrong_for_empty_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Launches nothing where an input is empty, and hands out memory as it is."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        results = compiled(*arguments)
        if any(isinstance(a, Tensor) and not a.numel() for a in arguments):
            return of_floats(results, lambda t: torch.full_like(t, 7))
        return results

    return changed(gm, inputs, run)


@found_by("lifetimes::inputs_die", "lifetimes::inputs_of_a_call_that_raises_die", "autograd::saved_memory_is_freed")
def keeps_inputs(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    kept: list[Any] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        kept.append(list(arguments))
        return compiled(*arguments)

    return changed(gm, inputs, run)


_FOREVER: list[Any] = []


@found_by("lifetimes::modules_die")
def keeps_modules(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Holds what it was compiled with, after a reset too."""
    _FOREVER.append(inputs)
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


@found_by("sizes::unbacked_sizes")
def asks_every_size_for_a_typical_one(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Plans by the number that a size has while it compiles, which some have not."""
    typical = 0
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        for size in value.shape if isinstance(value, Tensor) else ():
            typical += size.node.require_hint() if isinstance(size, torch.SymInt) else size
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


_BY_TEXT: dict[str, Run] = {}


@found_by("sizes::specialized_sizes")
def takes_the_special_for_the_general(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Knows programs by their text, which a program that was made for one size shares with that of all sizes."""
    text = str([(n.op, str(n.target)) for n in gm.graph.nodes])
    numbers = {i: a for i, a in enumerate(inputs) if type(a) is int}
    compiled = aot_eager(gm, inputs)
    _BY_TEXT[text] = lambda *arguments: compiled(*(numbers.get(i, a) for i, a in enumerate(arguments)))
    return lambda *arguments: _BY_TEXT[text](*arguments)
