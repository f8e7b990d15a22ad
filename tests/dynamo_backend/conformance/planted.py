"""Backends that are wrong on purpose, each in one way, and the cases that have to find it.

Most wrap torch's own `aot_eager`: what it compiles is right, and what is planted is all that is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

Run = Callable[..., Any]
# The cases that find each, by the name of the backend's function.
PLANTED: dict[str, tuple[str, ...]] = {}


def found_by(*cases: str) -> Callable[[Run], Run]:
    def note(backend: Run) -> Run:
        PLANTED[backend.__name__] = cases
        return backend

    return note


def changed(gm: fx.GraphModule, inputs: Sequence[Any], run: Callable[[Run, list[Any]], Any]) -> Run:
    """What `aot_eager` compiles, called by ``run`` with the compiled function and its arguments."""
    compiled = aot_eager(gm, inputs)
    return lambda *arguments: run(compiled, list(arguments))


def compiled_as(
    forward: Callable[[fx.GraphModule, Sequence[Any]], Run], backward: Callable[..., Run] | None = None
) -> Callable[..., Run]:
    """A backend over AOTAutograd, from functions that compile ATen graphs."""

    def boxed(compile_graph: Callable[..., Run]) -> Callable[..., Run]:
        return lambda gm, inputs: make_boxed_func(compile_graph(gm, inputs))

    made: Callable[..., Run] = aot_autograd(fw_compiler=boxed(forward), bw_compiler=boxed(backward or forward))
    return made


def of_floats(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change float tensors of results, wherever they are."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: change(t) if t.is_floating_point() and type(t) is Tensor else t, value
    )


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


@found_by("threads::one_function_in_many_threads", "threads::sizes_in_many_threads")
def shares_arguments_among_threads(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Puts its arguments where all threads see them, and reads them from there a little later."""
    shared: list[Any] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        shared[:] = arguments
        time.sleep(0.002)
        return compiled(*shared)

    return changed(gm, inputs, run)


@found_by("failures::the_next_call_works")
def keeps_its_lock_after_an_error(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    lock = threading.Lock()

    def run(compiled: Run, arguments: list[Any]) -> Any:
        lock.acquire()
        results = compiled(*arguments)
        lock.release()
        return results

    return changed(gm, inputs, run)


@found_by("threads::forked_child_calls")
def has_a_thread_of_its_own(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """A thread runs the programs, which a forked child does not have."""
    asked, answered, work = threading.Semaphore(0), threading.Semaphore(0), []
    compiled = aot_eager(gm, inputs)

    def serve() -> None:
        while True:
            asked.acquire()
            work[0] = compiled(*work[0])
            answered.release()

    threading.Thread(target=serve, daemon=True).start()

    def run(*arguments: Any) -> Any:
        work[:] = [arguments]
        asked.release()
        answered.acquire()
        return work[0]

    return run


@found_by("failures::index_out_of_range", "failures::errors_of_ops_get_out", "failures::integer_division_by_zero")
def swallows_errors(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    last: list[Any] = []

    def run(compiled: Run, arguments: list[Any]) -> Any:
        try:
            last[:] = compiled(*arguments)
        except Exception:
            return tuple(torch.zeros_like(r) if isinstance(r, Tensor) else r for r in last)
        return tuple(last)

    return changed(gm, inputs, run)


@found_by("failures::nothing_is_half_written")
def writes_before_it_checks(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """An input that it will write is zero while it works."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        kept = [
            (a, a.clone()) for a in arguments if isinstance(a, Tensor) and a.is_floating_point() and not a.requires_grad
        ]
        try:
            return compiled(*arguments)
        except Exception:
            for a, _ in kept:
                a.zero_()
            raise

    return changed(gm, inputs, run)


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


@found_by("options::unknown_option", "options::unknown_mode")
def ignores_options(gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Run:
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


@found_by("options::options_are_left_alone")
def writes_options(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Run:
    (options if options is not None else {}).clear()
    return changed(gm, inputs, lambda compiled, arguments: compiled(*arguments))


_PROGRAMS: dict[Any, Run] = {}


@found_by("caches::look_alikes")
def key_without_constants(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Takes programs for equal that differ in numbers alone."""
    key = tuple((n.op, str(n.target)) for n in gm.graph.nodes), tuple(str(getattr(a, "shape", "")) for a in inputs)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = aot_eager(gm, inputs)
    return _PROGRAMS[key]


@found_by("caches::parameters_change", "modules::training_loop", "modules::state_dict")
def builds_parameters_in(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Computes with the parameters of the first call."""
    first: dict[int, Tensor] = {}

    def run(compiled: Run, arguments: list[Any]) -> Any:
        for i, a in enumerate(arguments):
            if isinstance(a, torch.nn.Parameter):
                first.setdefault(i, a.detach().clone())
        with torch.no_grad():
            now = {i: arguments[i].detach().clone() for i in first}
            for i, old in first.items():
                arguments[i].data = old
        results = compiled(*arguments)
        for i, new in now.items():
            arguments[i].data = new
        return results

    return changed(gm, inputs, run)


@found_by("settings::number_of_threads")
def leaves_settings_changed(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Sets the number of threads to one, and does not set it back."""

    def run(compiled: Run, arguments: list[Any]) -> Any:
        results = compiled(*arguments)
        torch.set_num_threads(1)
        return results

    return changed(gm, inputs, run)


@found_by("subclasses::wrapper_in_and_out")
def unwraps_tensors(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Gives plain tensors, whatever went in."""

    def plain(t: Tensor) -> Tensor:
        inner = getattr(t, "first", t)
        return inner.as_subclass(Tensor) if isinstance(inner, Tensor) else t

    compiled: Run = lambda *arguments: torch.utils._pytree.tree_map_only(Tensor, plain, gm(*arguments))  # noqa: E731
    return compiled


@found_by("caches::two_sets_of_options")
def key_without_options(gm: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Run:
    """Has an option that changes roundings, and a cache whose key lacks it."""
    key = tuple(str(n.target) for n in gm.graph.nodes)
    if key not in _PROGRAMS:
        by = 1.01 if (options or {}).get("rounds") else 1.0
        _PROGRAMS[key] = changed(gm, inputs, lambda run, arguments: of_floats(run(*arguments), lambda t: t * by))
    return _PROGRAMS[key]


@found_by("control_flow::cond", "control_flow::loop")
def builds_branches_in(gm: fx.GraphModule, inputs: Sequence[Any]) -> Run:
    """Replays what the first call computed for tensors without dimensions."""
    first: dict[str, Any] = {}

    class Replaying(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if isinstance(result, Tensor) and not result.dim() and not result.requires_grad:
                return first.setdefault(n.name, result)
            return result

    return lambda *arguments: Replaying(gm).run(*arguments)
