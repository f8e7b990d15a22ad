"""Makes a failing program smaller while it fails: delta debugging over its results, lines, sizes and inputs.

Source: Zeller and Hildebrandt, Simplifying and isolating failure-inducing input, 2002.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Input, Program, Step, mentioned, renamed


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 150) -> Program:
    """The smallest program found in ``most`` trials that still fails."""
    trials = 0
    tried: set[str] = set()
    while True:
        for candidate in candidates(program):
            key = repr(replace(candidate, seed=0))
            if key in tried:
                continue
            tried.add(key)
            trials += 1
            if trials > most:
                return program
            if fails(candidate):
                program = candidate
                break
        else:
            return program


def candidates(program: Program) -> Iterator[Program]:
    """Simpler programs, the simplest first. Some of them may make no sense to eager."""
    if program.gradient:
        yield replace(program, gradient=False)
    if program.rounds > 1:
        yield replace(program, rounds=1)
    if len(program.sizes) > 1:
        for sizes in program.sizes:
            yield replace(program, sizes=(sizes,), dynamic=False)
        for k in range(len(program.sizes)):
            yield replace(program, sizes=(*program.sizes[:k], *program.sizes[k + 1 :]))
    for name in program.returns if len(program.returns) > 1 else ():
        yield pruned(replace(program, returns=(name,)))
    for k in range(len(program.returns) if len(program.returns) > 2 else 0):
        yield pruned(replace(program, returns=(*program.returns[:k], *program.returns[k + 1 :])))
    for k in reversed(range(len(program.steps))):
        yield from (p for p in [_without(program, k)] if p is not None)
    for k in reversed(range(len(program.steps))):
        for operand in program.steps[k].operands:
            if len(program.steps[k].results) == 1:
                yield _bypassed(program, k, operand)
    if program.options:
        yield replace(program, options={})
    if program.capture:
        yield replace(program, capture=False)
    yield from _simpler_inputs(program)
    yield from _smaller_sizes(program)


def _without(program: Program, k: int) -> Program | None:
    """The program without a step and all that needs its results; None where nothing would be returned."""
    gone = set(program.steps[k].results)
    steps: list[Step] = list(program.steps[:k])
    for step in program.steps[k + 1 :]:
        if gone.intersection(step.operands):
            gone.update(step.results)
        else:
            steps.append(step)
    returns = tuple(r for r in program.returns if not gone.intersection(mentioned(r, gone)))
    if not returns:
        # What led to the step is worth returning.
        returns = tuple(o for o in program.steps[k].operands if o not in gone)[:1]
    return pruned(replace(program, steps=tuple(steps), returns=returns)) if returns else None


def _bypassed(program: Program, k: int, operand: str) -> Program:
    """The program with a step's operand in the place of its result."""
    (result,) = program.steps[k].results

    def instead(step: Step) -> Step:
        operands = tuple(operand if o == result else o for o in step.operands)
        return replace(step, text=renamed(step.text, result, operand), operands=operands)

    later = tuple(instead(s) for s in program.steps[k + 1 :])
    returns = tuple(renamed(r, result, operand) for r in program.returns)
    return pruned(replace(program, steps=(*program.steps[:k], *later), returns=returns))


def pruned(program: Program) -> Program:
    """The program without inputs that nobody names, and without pure steps whose results nobody reads."""
    steps: list[Step] = []
    read = {n for r in program.returns for n in mentioned(r, _names(program))}
    for step in reversed(program.steps):
        if step.kind == "write" or not step.results or read.intersection(step.results):
            steps.append(step)
            read.update(step.operands)
    inputs: list[Input] = []
    for i in reversed(program.inputs):
        if i.name in read:
            inputs.append(i)
            read.update(mentioned(i.text, _names(program)))
    return replace(program, steps=tuple(reversed(steps)), inputs=tuple(reversed(inputs)))


def _names(program: Program) -> tuple[str, ...]:
    return (*(i.name for i in program.inputs), *(r for s in program.steps for r in s.results))


def _simpler_inputs(program: Program) -> Iterator[Program]:
    for k, i in enumerate(program.inputs):
        texts = []
        if i.text.endswith(")"):
            texts.append(f"({i.text}).contiguous()")
        texts += [re.sub(r", \"(normal|special|range)\"", "", i.text)]
        for text in texts:
            if text != i.text and not i.text.endswith(".contiguous()"):
                yield replace(program, inputs=(*program.inputs[:k], replace(i, text=text), *program.inputs[k + 1 :]))
        if i.grad:
            yield replace(program, inputs=(*program.inputs[:k], replace(i, grad=False), *program.inputs[k + 1 :]))


def _smaller_sizes(program: Program) -> Iterator[Program]:
    if len(program.sizes) != 1:
        return
    (sizes,) = program.sizes
    for name, n in sizes.items():
        for smaller in (m for m in (1, 2, 3, n // 2, n - 1) if 0 < m < n):
            yield replace(program, sizes=({**sizes, name: smaller},))
