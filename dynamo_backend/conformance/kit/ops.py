"""Custom ops as users write them, for cases that need some. They are registered when first asked for."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import torch
from torch import Tensor


@functools.cache
def register() -> None:
    """Put the ops into torch's library, under `mlc_conformance::`."""
    library = torch.library.Library("mlc_conformance", "DEF")

    library.define("checked(Tensor x) -> Tensor")
    library.define("twice(Tensor x) -> Tensor")
    library.define("add_to(Tensor(a!) x, Tensor y) -> ()")
    library.define("add_to_and_sum(Tensor(a!) x, Tensor? y) -> Tensor")
    library.define("parts(Tensor x) -> Tensor[]")
    library.define("noted(Tensor x) -> Tensor")
    library.define("looked(Tensor x) -> Tensor")

    def checked(x: Tensor) -> Tensor:
        if (x < 0).any():
            raise ValueError("a negative number")
        return x.clone()

    def add_to(x: Tensor, y: Tensor) -> None:
        x.add_(y)

    def add_to_and_sum(x: Tensor, y: Tensor | None) -> Tensor:
        x.add_(1 if y is None else y)
        return x.sum(0)

    def parts(x: Tensor) -> list[Tensor]:
        return [x[0] + 1, x[1:] * 2]

    def noted(x: Tensor) -> Tensor:
        result = x.clone()
        NOTED[:] = [weakref.ref(result.untyped_storage())]
        return result

    def looked(x: Tensor) -> Tensor:
        gc.collect()
        memory = NOTED[0]()
        # A gradient may be written over what was saved: then that memory is its own.
        ALIVE.append(memory is not None and memory.data_ptr() != x.untyped_storage().data_ptr())
        return x.clone()

    kernels: dict[str, Any] = {
        "checked": checked, "twice": lambda x: x * 2, "add_to": add_to, "add_to_and_sum": add_to_and_sum,
        "parts": parts, "noted": noted, "looked": looked,
    }  # fmt: skip
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CompositeExplicitAutograd")
    fakes: dict[str, Any] = {
        "checked": torch.empty_like, "twice": torch.empty_like, "add_to": lambda x, y: None,
        "add_to_and_sum": lambda x, y: x.new_empty(x.shape[1:]),
        "parts": lambda x: [x.new_empty(x.shape[1:]), x.new_empty((x.shape[0] - 1, *x.shape[1:]))],
        "noted": torch.empty_like, "looked": torch.empty_like,
    }  # fmt: skip
    for name, fake in fakes.items():
        torch.library.register_fake(f"mlc_conformance::{name}", fake, lib=library)
    gradients: dict[str, Any] = {
        "twice": lambda ctx, gradient: gradient * 2,
        "noted": lambda ctx, gradient: torch.ops.mlc_conformance.looked(gradient),
    }
    for name, gradient in gradients.items():
        torch.library.register_autograd(
            f"mlc_conformance::{name}", gradient, lib=library, setup_context=lambda ctx, inputs, output: None
        )
    _LIBRARIES.append(library)  # it takes its ops with it when it dies


_LIBRARIES: list[torch.library.Library] = []
# The memory of the last result of `noted`, and whether it was there whenever `looked`, its gradient, ran.
NOTED: list[weakref.ref[Any]] = []
ALIVE: list[bool] = []


def checked(x: Tensor) -> Tensor:
    return torch.ops.mlc_conformance.checked(x)  # type: ignore[no-any-return]
