"""Random tensor functions: sound, read back from their text, and of the meaning that their loops have."""

import pytest
from random_programs import arguments, compare, make_program

from torch_mlc.ir.oracle.function import run_function
from torch_mlc.ir.oracle.oracle import run_nest, size
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show
from torch_mlc.ir.verify.verify import verify


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_functions_are_sound_and_read_back(first: int) -> None:
    for seed in range(first, first + 50):
        function = make_program(seed).function
        verify(function)
        assert parse(show(function)) == function, f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_the_oracle_of_a_function_is_that_of_its_loops(first: int) -> None:
    for seed in range(first, first + 50):
        program = make_program(seed)
        for sizes in program.sizes:
            inputs = arguments(program, sizes)
            wanted = run_nest(program.nest, inputs, sizes)
            # Loops may see two dimensions as one.
            shapes = {b.name: tuple(size(e, sizes) for e in b.shape) for b in program.function.inputs}
            given = {name: inputs[name].reshape(shape) for name, shape in shapes.items()}
            found = run_function(program.function, given, sizes)
            compare(program.nest, {n: a.reshape(wanted[n].shape) for n, a in found.items()}, wanted)
