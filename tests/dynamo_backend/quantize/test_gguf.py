"""Blocks and files of GGUF: bytes by hand, there and back."""

import struct

import pytest
import torch

import torch_mlc


def test_a_block_by_hand():
    numbers = [(3 * k) % 16 - 8 for k in range(32)]
    data = struct.pack("<e", 0.5) + bytes((numbers[k] + 8) | (numbers[k + 16] + 8) << 4 for k in range(16))
    weight = torch_mlc.from_gguf_blocks(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1, 32, "int4")
    assert torch.equal(weight.dequantized(), 0.5 * torch.tensor([numbers], dtype=torch.float32))
    data = struct.pack("<e32b", -0.25, *range(-16, 16))
    weight = torch_mlc.from_gguf_blocks(torch.frombuffer(bytearray(data), dtype=torch.uint8), 1, 32, "int8")
    assert torch.equal(weight.dequantized(), -0.25 * torch.arange(-16.0, 16.0)[None])


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_there_and_back_bit_by_bit(weights):
    data = torch.randint(0, 256, (19 * 3, 18 if weights == "int4" else 34), dtype=torch.uint8)
    data[:, :2] = torch.randn(19 * 3, 1).half().view(torch.uint8)
    weight = torch_mlc.from_gguf_blocks(data.flatten(), 19, 96, weights)
    assert torch.equal(torch_mlc.to_gguf_blocks(weight), data.flatten())
    model = torch_mlc.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 5)), weights)
    again = torch_mlc.from_gguf_blocks(torch_mlc.to_gguf_blocks(model[0].weight), 5, 64, weights)
    assert torch.equal(again.codes, model[0].weight.codes) and torch.equal(again.scales, model[0].weight.scales)


def test_wrong_blocks_are_told():
    with pytest.raises(torch_mlc.QuantizeError, match="which take 36"):
        torch_mlc.from_gguf_blocks(torch.zeros(35, dtype=torch.uint8), 2, 32, "int4")
    with pytest.raises(torch_mlc.QuantizeError, match="group=32"):
        torch_mlc.to_gguf_blocks(torch_mlc.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 5)), "int4", 64)[0].weight)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _file(tensors: list[tuple[str, tuple[int, ...], int, bytes]], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 3)
    head += _text("general.name") + struct.pack("<I", 8) + _text("small")
    head += _text("general.alignment") + struct.pack("<II", 4, 64)
    head += _text("list") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)
    at, data = 0, b""
    for name, shape, kind, content in tensors:
        head += _text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % 64)
        at += len(content)
    return head + bytes(-len(head) % 64) + data


def test_a_file(tmp_path):
    blocks = torch.randint(0, 256, (2 * 18,), dtype=torch.uint8)
    blocks[:2] = blocks[18:20] = torch.tensor([0, 60], dtype=torch.uint8)  # 1.0
    path = tmp_path / "model.gguf"
    floats = struct.pack("<3f", 1, 2, 3)
    path.write_bytes(_file([("w", (2, 32), 2, bytes(blocks.tolist())), ("b", (3,), 0, floats), ("k", (256,), 12, b"")]))
    file = torch_mlc.GgufFile(path)
    assert file.keys["general.name"] == "small" and file.keys["list"] == [1, -2, 3]
    weight = file.tensors["w"].read()
    assert weight.rows == 2 and torch.equal(torch_mlc.to_gguf_blocks(weight), blocks)
    assert file.tensors["b"].read().tolist() == [1, 2, 3]
    with pytest.raises(torch_mlc.QuantizeError, match="k is of type 12"):
        file.tensors["k"].read()


def test_damaged_files_are_told(tmp_path):
    path = tmp_path / "model.gguf"
    whole = _file([("b", (3,), 0, struct.pack("<3f", 1, 2, 3))])
    for length in range(len(whole) - 64 + 12):
        path.write_bytes(whole[:length])
        with pytest.raises(torch_mlc.QuantizeError, match="no GGUF file that can be read"):
            torch_mlc.GgufFile(path)
    path.write_bytes(_file([], version=9))
    with pytest.raises(torch_mlc.QuantizeError, match="version 9"):
        torch_mlc.GgufFile(path)
