"""What is seen of one call: results, arguments and gradients afterwards, who shares memory, what it left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True, slots=True)
class TensorSeen:
    """A tensor as it was: ``value`` is a copy of its elements, ``strides`` those of dimensions above one."""

    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: str
    needs_gradient: bool
    conjugate: bool
    negative: bool
    inference: bool
    value: Tensor


@dataclass(slots=True)
class Observation:
    """One call. Names are "result 0", "argument 1", "parameter weight"; a gradient is None where there is none."""

    structure: str = ""
    results: dict[str, object] = field(default_factory=dict)
    afterwards: dict[str, TensorSeen] = field(default_factory=dict)
    written: dict[str, bool] = field(default_factory=dict)
    gradients: dict[str, TensorSeen | None] = field(default_factory=dict)
    shared: frozenset[frozenset[str]] = frozenset()
    same: dict[str, str] = field(default_factory=dict)
    settings: dict[str, object] = field(default_factory=dict)
    random_state: bool = False
    # The results themselves, to look at again after later calls.
    kept: list[tuple[str, Tensor]] = field(default_factory=list)


def inner_tensors(x: Tensor) -> list[Tensor]:
    """The plain tensors that a wrapper is made of; the tensor itself where it is none."""
    names = getattr(x, "__tensor_flatten__", None)
    return [t for name in names()[0] for t in inner_tensors(getattr(x, name))] if names else [x]


def seen(x: Tensor) -> TensorSeen:
    """The facts of a tensor, with a copy of its elements."""
    with torch.no_grad(), torch.inference_mode(False):
        inner = inner_tensors(x.detach())
        value = torch.cat([t.resolve_conj().resolve_neg().clone().reshape(-1) for t in inner]) if len(inner) > 1 else (
            inner[0].resolve_conj().resolve_neg().clone())  # fmt: skip
    strides = None
    if x.layout is torch.strided and x.numel():
        strides = tuple(s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1)
    return TensorSeen(
        type(x).__name__, tuple(x.shape), strides, x.dtype, str(x.device), x.requires_grad, x.is_conj(), x.is_neg(),
        x.is_inference(), value,
    )  # fmt: skip


def storage_of(x: Tensor) -> int | None:
    """Where the memory of a tensor begins; None where it has none."""
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) or x.layout is not torch.strided:
        return None
    return x.untyped_storage().data_ptr() or None


def settings_now() -> dict[str, object]:
    """The settings of torch that a call has to leave as they are."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "number of threads": torch.get_num_threads(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
    }


def random_states() -> tuple[bytes, int]:
    """The state of torch's generator of the CPU, and a hash of Python's."""
    return bytes(torch.get_rng_state().tolist()), hash(random.getstate())


def version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def observe(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    state: Mapping[str, Tensor],
    backward: Callable[[Sequence[Tensor]], None] | None,
) -> Observation:
    """Call ``function``, and ``backward`` with those of its results that have gradients.

    ``state`` are tensors that the function reaches beside its arguments, by name.
    """
    given = {f"argument {i}": a for i, a in enumerate(tree_flatten(arguments)[0]) if isinstance(a, Tensor)} | dict(
        state
    )
    versions = {name: version_of(t) for name, t in given.items()}
    settings, states = settings_now(), random_states()
    result = function(*arguments)
    observed = Observation()
    now = settings_now()
    observed.settings = {name: now[name] for name in now if now[name] != settings[name]}
    observed.random_state = random_states() != states
    leaves, structure = tree_flatten(result)
    observed.structure = str(structure)
    named = {f"result {i}": leaf for i, leaf in enumerate(leaves)}
    tensors = {name: leaf for name, leaf in named.items() if isinstance(leaf, Tensor)}
    observed.results = {name: seen(leaf) if isinstance(leaf, Tensor) else leaf for name, leaf in named.items()}
    everything = given | tensors
    homes: dict[int, set[str]] = {}
    for name, t in everything.items():
        if (home := storage_of(t)) is not None:
            homes.setdefault(home, set()).add(name)
    observed.shared = frozenset(frozenset(names) for names in homes.values() if len(names) > 1)
    first: dict[int, str] = {}
    observed.same = {name: first.setdefault(id(t), name) for name, t in everything.items()}
    if backward is not None:
        backward([t for t in tensors.values() if t.requires_grad])
        observed.gradients = {name: None if t.grad is None else seen(t.grad) for name, t in given.items() if t.is_leaf}
    observed.written = {name: version_of(t) != versions[name] for name, t in given.items()}
    observed.afterwards = {name: seen(t) for name, t in given.items()}
    observed.kept = list(tensors.items())
    return observed
