"""Weights of a decoder from files of safetensors, as Hugging Face writes them."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import DecoderConfig
from .errors import GenerateError
from .model import Decoder

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: in ``file``, from byte ``begin`` to ``end`` behind its header of ``start`` bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    start: int


class WeightFiles:
    """The tensors of a folder by name; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
            mend = f"; {others[0]} would have to be saved as safetensors first" if others else ""
            raise GenerateError(f"{folder} holds no *.safetensors{mend}")
        self.folder = folder
        self.entries = {name: entry for file in files for name, entry in _header(file)}
        self._maps: dict[Path, mmap.mmap] = {}

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as it is stored, mapped from its file. Raises: GenerateError where it is missing or has another
        shape."""
        entry = self.entries.get(name)
        if entry is None:
            raise GenerateError(
                f"{self.folder} has no tensor {name!r} of shape {list(shape)}, which config.json asks for. Was the "
                "download complete, and do the weights belong to this config.json?"
            )
        if entry.shape != shape:
            raise GenerateError(
                f"{entry.file}: {name!r} is {list(entry.shape)}; by config.json it would be {list(shape)}. The weights "
                "belong to another config.json"
            )
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise GenerateError(
                f"{entry.file}: {name!r} has elements of the type {entry.dtype}; known are {', '.join(_DTYPES)}"
            )
        if entry.file not in self._maps:
            with entry.file.open("rb") as file:
                self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = torch.Size(shape).numel()
        at = entry.start + entry.begin
        if entry.end - entry.begin != count * dtype.itemsize or at + count * dtype.itemsize > len(
            self._maps[entry.file]
        ):
            raise GenerateError(f"{entry.file} is damaged or cut off: {name!r} has not as many bytes as its shape says")
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._maps[entry.file], dtype=torch.uint8, count=count * dtype.itemsize, offset=at)
        return (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype).view(shape)


def _header(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise GenerateError(f"{file} is no file of safetensors, or cut off: its header would have {length} bytes")
        try:
            found = json.loads(opened.read(length))
            for name, entry in found.items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    yield name, StoredTensor(file, entry["dtype"], tuple(entry["shape"]), begin, end, 8 + length)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GenerateError(f"{file} is no file of safetensors: its header cannot be read ({error})") from error


def load_decoder(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    """A decoder with the weights of a folder, as ``dtype``. Raises: GenerateError."""
    files = WeightFiles(folder)
    with torch.device("meta"):
        model = Decoder(config)
    state = {name: _parts(files, name, parts, dtype) for name, parts in _sources(config).items()}
    model.load_state_dict(state, assign=True, strict=not config.tied)
    if config.tied:
        model.lm_head.weight = model.embed_tokens.weight
    model.frequencies = torch.tensor(config.frequencies())
    return model.eval().requires_grad_(False)


def _parts(files: WeightFiles, name: str, parts: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Tensor:
    found = [files.read(part, shape).to(dtype) for part, shape in parts.items()]
    # A weight that needs no conversion is copied out of its file all the same: kernels want it aligned, and now.
    return torch.cat(found) if len(found) > 1 else found[0].clone()


def _sources(config: DecoderConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Our names, each with the names and shapes of the tensors that stand one below the other in it."""
    width, head = config.width, config.head_width
    rows = {"q": config.heads * head, "k": config.kv_heads * head, "v": config.kv_heads * head}
    found: dict[str, dict[str, tuple[int, ...]]] = {
        "embed_tokens.weight": {"model.embed_tokens.weight": (config.vocabulary, width)},
        "norm.weight": {"model.norm.weight": (width,)},
    }
    if not config.tied:
        found["lm_head.weight"] = {"lm_head.weight": (config.vocabulary, width)}
    for k in range(config.layers):
        here = f"layers.{k}"
        there = f"model.{here}"
        found[f"{here}.self_attn.qkv_proj.weight"] = {
            f"{there}.self_attn.{x}_proj.weight": (n, width) for x, n in rows.items()
        }
        if config.qkv_bias:
            found[f"{here}.self_attn.qkv_proj.bias"] = {
                f"{there}.self_attn.{x}_proj.bias": (n,) for x, n in rows.items()
            }
        if config.head_norm:
            for x in ("q_norm", "k_norm"):
                found[f"{here}.self_attn.{x}.weight"] = {f"{there}.self_attn.{x}.weight": (head,)}
        found[f"{here}.self_attn.o_proj.weight"] = {f"{there}.self_attn.o_proj.weight": (width, config.heads * head)}
        for x in ("gate_proj", "up_proj"):
            found[f"{here}.mlp.{x}.weight"] = {f"{there}.mlp.{x}.weight": (config.hidden, width)}
        found[f"{here}.mlp.down_proj.weight"] = {f"{there}.mlp.down_proj.weight": (width, config.hidden)}
        for x in ("input_layernorm", "post_attention_layernorm"):
            found[f"{here}.{x}.weight"] = {f"{there}.{x}.weight": (width,)}
    return found
