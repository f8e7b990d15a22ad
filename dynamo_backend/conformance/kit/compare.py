"""How what a backend did differs from what eager did, as sentences."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .observe import Observation, TensorSeen

# What a case may leave out of the comparison.
# AOTAutograd itself gives zeros where one of several results has no gradient: "zero gradients" are then as None.
PARTS = frozenset({"strides", "random state", "values", "shared", "written", "same", "zero gradients"})


def differences(ours: Observation, eager: Observation, leave_out: frozenset[str], loose: float) -> Iterator[str]:
    """Every difference. ``loose`` is a factor of torch's own tolerances."""
    assert leave_out <= PARTS, leave_out
    if ours.structure != eager.structure:
        yield f"results are nested as {ours.structure}, eager's as {eager.structure}"
        return
    for name, theirs in eager.results.items():
        yield from _result(name, ours.results[name], theirs, leave_out, loose)
    for name, theirs_after in eager.afterwards.items():
        yield from _tensor(f"{name}, after the call,", ours.afterwards[name], theirs_after, leave_out, loose)
    for name, gradient in eager.gradients.items():
        mine = ours.gradients.get(name)
        if gradient is None and mine is not None and "zero gradients" in leave_out and not mine.value.count_nonzero():
            continue
        if (mine is None) != (gradient is None):
            yield f"the gradient of {name} is {'None' if mine is None else 'a tensor'}, eager's is " + (
                "None" if gradient is None else "a tensor"
            )
        elif mine is not None and gradient is not None:
            yield from _tensor(f"the gradient of {name}", mine, gradient, leave_out | {"strides"}, loose)
    if "written" not in leave_out:
        for name, written in eager.written.items():
            if ours.written[name] != written:
                moved = "moved" if ours.written[name] else "did not move"
                yield f"the version counter of {name} {moved}, unlike eager's"
    if "shared" not in leave_out and ours.shared != eager.shared:
        for names in sorted(map(sorted, ours.shared - eager.shared)):
            yield f"{' and '.join(names)} share memory, which they do not so in eager"
        for names in sorted(map(sorted, eager.shared - ours.shared)):
            yield f"{' and '.join(names)} share memory in eager, and not so here"
    if "same" not in leave_out and ours.same != eager.same:
        for name, other in eager.same.items():
            if ours.same[name] != other:
                yield f"{name} is the same object as {ours.same[name]}, in eager as {other}"
    for name, value in ours.settings.items():
        if eager.settings.get(name) != value:
            yield f"the call changed torch's {name} to {value}"
    for name, value in eager.settings.items():
        if ours.settings.get(name) != value:
            yield f"the call did not change torch's {name} to {value}"
    if "random state" not in leave_out and ours.random_state != eager.random_state:
        yield "the call moved the state of a random generator" if ours.random_state else (
            "the call left the state of random generators as it was")  # fmt: skip


def _result(name: str, mine: object, theirs: object, leave_out: frozenset[str], loose: float) -> Iterator[str]:
    if isinstance(mine, TensorSeen) and isinstance(theirs, TensorSeen):
        yield from _tensor(name, mine, theirs, leave_out, loose)
    elif type(mine) is not type(theirs):
        yield f"{name} is a {_kind(mine)}, eager's is a {_kind(theirs)}"
    elif mine != theirs and not (mine != mine and theirs != theirs):
        yield f"{name} is {mine!r}, eager's is {theirs!r}"


def _kind(value: object) -> str:
    return value.kind if isinstance(value, TensorSeen) else type(value).__name__


def _tensor(name: str, mine: TensorSeen, theirs: TensorSeen, leave_out: frozenset[str], loose: float) -> Iterator[str]:
    for what in ("kind", "shape", "dtype", "device", "needs_gradient", "conjugate", "negative", "inference", "strides"):
        if what in leave_out:
            continue
        one, other = getattr(mine, what), getattr(theirs, what)
        if one != other:
            yield f"{name} has {what.replace('_', ' ')} {one}, eager's has {other}"
            if what == "shape":
                return
    if "values" not in leave_out and (told := unequal(mine.value, theirs.value, loose)):
        yield f"{name} {told}"


def unequal(mine: torch.Tensor, theirs: torch.Tensor, loose: float = 1.0) -> str:
    """How elements differ by more than rounding does; "" where they do not."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"is {mine.dtype} {tuple(mine.shape)}, eager's {theirs.dtype} {tuple(theirs.shape)}"
    rtol, atol = torch.testing._comparison.get_tolerances(mine, theirs, rtol=None, atol=None)
    close = torch.isclose(mine, theirs, rtol=rtol * loose, atol=atol * loose, equal_nan=True)
    if bool(close.all()):
        return ""
    wrong = (~close).nonzero()
    where = tuple(wrong[0].tolist())
    return (
        f"has {len(wrong)} wrong element{'s' if len(wrong) > 1 else ''} of {mine.numel()}: at {list(where)} "
        f"{mine[where].item()!r}, eager's {theirs[where].item()!r}"
    )
