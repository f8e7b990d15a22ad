"""Wrong with gradients, with what autograd saves, and with random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .planting import Run, changed, compiled_as, found_by, of_floats


@found_by("gradients::unused_input", "gradients::frozen_parameters")
def zeros_for_gradients_that_are_none(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Every float argument gets a gradient: of zeros where it had none."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        for a in arguments:
            if isinstance(a, Tensor) and a.is_leaf and a.is_floating_point() and type(a) is not Tensor:
                a.grad = torch.zeros_like(a) if a.grad is None else a.grad
            elif isinstance(a, Tensor) and a.is_leaf and a.requires_grad and a.grad is None:
                a.grad = torch.zeros_like(a)
        return compiled(*arguments)

    return changed(gm, inputs, run)


@found_by("gradients::gradients_come_and_go", "settings::no_grad_around", "gradients::gradients_add_up")
def loses_gradients(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: of_floats(compiled(*arguments), Tensor.detach))


def _backward_over_saved(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    def run(*arguments: Any) -> Any:
        results = gm(*arguments)
        for a in arguments[:1]:
            if isinstance(a, Tensor) and a.is_floating_point():
                with torch.no_grad():
                    a.zero_()
        return results

    return run


@found_by("autograd::retained_graph", "autograd::interleaved_calls")
def writes_over_what_was_saved(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """The backward takes the memory of a saved tensor for its own."""
    return compiled_as(lambda g, i: g, _backward_over_saved)(gm, inputs)


@found_by("autograd::interleaved_calls")
def saves_for_one_call(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """Keeps what the backward reads in one place, for the last forward alone."""
    last: list[Any] = []

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        def run(*arguments: Any) -> Any:
            last[:] = graph(*arguments)[1:]
            return graph(*arguments)

        return run

    def backward(graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        def run(*arguments: Any) -> Any:
            gradients = arguments[len(last) :]
            return graph(*last, *gradients)

        return run

    return compiled_as(forward, backward)(gm, inputs)


@found_by("random_numbers::calls_differ", "random_numbers::state_moves", "random_numbers::draws_of_one_program_differ")
def draws_one_number(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """Seeds each op that draws with the same number, and leaves the generator as it was."""

    class Fixed(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return super().run_node(n)

    return compiled_as(lambda g, i: Fixed(g).run)(gm, inputs)


@found_by("random_numbers::nothing_random_moves_nothing", "random_numbers::compiling_draws_nothing")
def draws_at_its_first_call(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Tries itself on random numbers before it is first used."""
    tried: list[Tensor] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        if not tried:
            tried.append(torch.rand(1))
        return compiled(*arguments)

    return changed(gm, inputs, run)


@found_by("random_numbers::seed_repeats", "random_numbers::state_is_restored")
def ignores_seeds(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Has a generator of its own, which nobody seeds."""
    state = [torch.Generator().manual_seed(4711).get_state()]

    def run(compiled: Run, arguments: list[Any]) -> Any:
        outside = torch.get_rng_state()
        torch.set_rng_state(state[0])
        results = compiled(*arguments)
        state[0] = torch.get_rng_state()
        torch.set_rng_state(outside)
        torch.rand(1)
        return results

    return changed(gm, inputs, run)


@found_by("random_numbers::dropout_agrees_with_its_backward")
def draws_again_in_the_backward(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """Masks that were saved are drawn anew."""

    def backward(graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        def run(*arguments: Any) -> Any:
            return graph(
                *(
                    torch.rand(a.shape) > 0.4 if isinstance(a, Tensor) and a.dtype == torch.bool else a
                    for a in arguments
                )
            )

        return run

    return compiled_as(lambda g, i: g, backward)(gm, inputs)


@found_by("autograd::layouts_of_what_was_saved")
def saves_in_another_layout(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """What the forward saves is contiguous, and the backward reads it as it lay when it was traced."""

    def forward(graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        def run(*arguments: Any) -> Any:
            first, *saved = graph(*arguments)
            given = {id(a) for a in arguments}
            return [first, *(of_floats(s, Tensor.contiguous) if id(s) not in given else s for s in saved)]

        return run

    def backward(graph: fx.GraphModule, promised: Sequence[Any]) -> Run:
        def read(a: Any, like: Any) -> Any:
            return torch.as_strided(a, like.shape, like.stride()) if isinstance(a, Tensor) else a

        return lambda *arguments: graph(*map(read, arguments, promised))

    return compiled_as(forward, backward)(gm, inputs)


@found_by("lifetimes::saved_values_die_in_the_backward")
def holds_arguments_while_it_runs(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    """Calls that are not boxed: the caller's tuple has every saved value until the backward is over."""
    return compiled_as(lambda g, i: g)(gm, inputs)
