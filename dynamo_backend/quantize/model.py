"""``quantize_``: the linear layers of a model with weights of four or eight bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from .errors import QuantizeError
from .modules import QuantizedEmbedding, QuantizedLinear, QuantizedWeight, quantized_weight
from .panels import BITS, inputs_of_word

M = TypeVar("M", bound=nn.Module)
Filter = Callable[[str, nn.Module], bool]


def quantize_(
    model: M,
    weights: str = "int4",
    group: int | None = 32,
    activations: str | None = None,
    filter: Filter | None = None,
    embeddings: bool = False,
) -> M:
    """Give the linear layers of a model weights of four or eight bits, in place; returns the model.

    ``weights`` is "int4" or "int8". Each ``group`` of inputs of an output has a scale (float16; None: all inputs have
    one); inputs are padded with zeros to whole groups. With ``activations="int8"`` what comes in is rounded too, a row
    and group at a time, and products are sums of integers. Computing is in float32, and results have the type of the
    input. ``filter(name, module)`` says which modules are replaced: of ``nn.Linear``, and of ``nn.Embedding`` with
    ``embeddings=True``. Modules that share a weight share what is made of it.

    Gradients reach inputs and biases, not weights. ``state_dict`` holds ``weight.codes`` and ``weight.scales``; a model
    that was quantized alike loads it.
    Raises: QuantizeError for a wrong argument, a weight with NaN or infinities, and a model with nothing to replace.
    """
    _check(weights, group, activations)
    made: dict[int, nn.Module] = {}
    rounded: dict[int, tuple[Tensor, QuantizedWeight]] = {}

    def weight_of(weight: Tensor) -> QuantizedWeight:
        key = weight.data_ptr() if weight.numel() else id(weight)
        if key not in rounded or rounded[key][0].shape != weight.shape:
            step = inputs_of_word(BITS[weights])
            whole = -(-weight.shape[1] // step) * step
            rounded[key] = weight, quantized_weight(weight, weights, whole if group is None else group)
        return rounded[key][1]

    def replacement(name: str, module: nn.Module) -> nn.Module | None:
        is_linear = type(module) is nn.Linear
        if not is_linear and not (embeddings and type(module) is nn.Embedding):
            return None
        if filter is not None and not filter(name, module):
            return None
        if id(module) not in made:
            weight = module.weight
            assert isinstance(weight, Tensor)
            if 0 in weight.shape or not weight.dtype.is_floating_point or weight.is_meta:
                raise QuantizeError(f"{name or 'the model'}: a weight {weight.dtype} {tuple(weight.shape)} on "
                                    f"{weight.device} has nothing to round; leave it out by filter=")  # fmt: skip
            try:
                inner = weight_of(weight)
            except QuantizeError as error:
                raise QuantizeError(f"{name or 'the model'}: {error}") from None
            if isinstance(module, nn.Linear):
                made[id(module)] = QuantizedLinear(inner, module.bias, activations)
            elif isinstance(module, nn.Embedding):
                if module.max_norm is not None:
                    raise QuantizeError(f"{name}: an embedding with max_norm writes to its table; leave it out")
                made[id(module)] = QuantizedEmbedding(inner, weight.dtype)
            made[id(module)].train(module.training)
        return made[id(module)]

    if (whole := replacement("", model)) is not None:
        raise QuantizeError(
            f"the model is itself an {type(model).__name__}, which cannot be replaced in place; wrap it: "
            f"torch.nn.Sequential(model), or use torch_mlc.{type(whole).__name__}"
        )
    for name, parent in tuple(model.named_modules(remove_duplicate=False)):
        for child_name, child in tuple(parent._modules.items()):
            if child is None:
                continue
            found = replacement(f"{name}.{child_name}" if name else child_name, child)
            if found is not None:
                setattr(parent, child_name, found)
    if not made:
        raise QuantizeError("the model has no nn.Linear to quantize that the filter lets through")
    return model


def _check(weights: str, group: int | None, activations: str | None) -> None:
    if weights not in BITS:
        raise QuantizeError(f"weights={weights!r}: it is 'int4' or 'int8'")
    if activations not in (None, "int8"):
        raise QuantizeError(f"activations={activations!r}: it is None or 'int8'")
    step = inputs_of_word(BITS[weights])
    if group is not None and (type(group) is not int or group <= 0 or group % step):
        raise QuantizeError(f"group={group!r}: it is a multiple of {step} for {weights}, or None for whole rows")
