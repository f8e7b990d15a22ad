"""What a benchmark model must say about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Size = Literal["tiny", "small", "full"]
SIZES: tuple[Size, ...] = ("tiny", "small", "full")


class Inputs(NamedTuple):
    """One batch: the positional arguments of ``forward`` and the targets of the loss.

    A NamedTuple because TorchDynamo takes it apart as an argument without a graph break.
    """

    args: tuple[Tensor, ...]
    targets: Tensor

    def cast(self, dtype: torch.dtype) -> Inputs:
        """The same batch with its floating tensors in ``dtype``; integer and bool tensors are untouched."""

        def one(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() else t

        return Inputs(tuple(one(a) for a in self.args), one(self.targets))

    def copied(self) -> Inputs:
        """The same batch in memory of its own, for who writes to it."""
        return Inputs(tuple(a.clone() for a in self.args), self.targets.clone())


@dataclass(frozen=True, slots=True)
class DynamicDim:
    """Dimension ``dim`` of positional argument ``arg`` follows the named entry of ``ModelSpec.dims``."""

    name: str
    arg: int
    dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and everything a benchmark or a test needs to run it.

    ``configs``: widths and depths for each size. "tiny" runs in well under a second on one core, "small" takes
    20-300 ms a training step on two cores, "full" is for a GPU.
    ``dims``: the default batch, sequence length, ... for each size, which ``inputs`` lets a caller override.
    ``dynamic``: the dimensions that may vary between calls of one compiled function.
    ``variants``: three sets of dims, valid for the "tiny" size, for tests with ``dynamic=True``.
    ``trains``: whether a training step is meant; a step of generation, which writes its caches, is inference alone.
    """

    name: str
    module: Callable[[Any], nn.Module]
    configs: Mapping[Size, Any]
    dims: Mapping[Size, Mapping[str, int]]
    batch: Callable[[Any, Mapping[str, int], torch.Generator], Inputs]
    loss_of: Callable[[Any, Inputs], Tensor]
    dynamic: tuple[DynamicDim, ...]
    variants: tuple[Mapping[str, int], ...]
    trains: bool = True

    def config(self, size: Size, **overrides: int) -> Any:
        """The configuration of ``size`` with fields replaced, as in ``config("small", layers=2)``."""
        config = self.configs[size]
        unknown = sorted(set(overrides) - set(config._fields))
        if unknown:
            raise ValueError(f"{self.name}: no such field {unknown}; the configuration has {list(config._fields)}")
        return config._replace(**overrides)

    def build(self, size: Size, *, seed: int = 0, **overrides: int) -> nn.Module:
        """A float32 model on the CPU in training mode, the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module(self.config(size, **overrides))

    def inputs(
        self,
        size: Size,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        seed: int = 0,
        **dims: int,
    ) -> Inputs:
        """One batch with the default dims of ``size``, of which any may be given (``batch=3, seq=24``).

        Values are drawn in float32 on the CPU and then converted, so every device and dtype sees the same batch.
        """
        unknown = sorted(set(dims) - set(self.dims[size]))
        if unknown:
            raise ValueError(f"{self.name}: no such dimension {unknown}; it has {sorted(self.dims[size])}")
        generator = torch.Generator().manual_seed(seed)
        made = self.batch(self.configs[size], {**self.dims[size], **dims}, generator).cast(dtype)
        return Inputs(tuple(a.to(device) for a in made.args), made.targets.to(device))

    def loss(self, output: Any, inputs: Inputs) -> Tensor:
        """A scalar from the output of ``forward(*inputs.args)``."""
        return self.loss_of(output, inputs)
