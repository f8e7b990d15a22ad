"""Models exported for AArch64: they run under qemu where that and a compiler are; everywhere their code is read."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

import torch_mlc
from tests.runtime.export.test_other_systems import ARM_GCC, ARM_ROOT, QEMU, needs_arm
from torch_mlc.codegen.elf.format import HEADER, SECTION_HEADER
from torch_mlc.codegen.export.runtime import IMPORTS
from torch_mlc.dynamo_backend.cli.main import cli
from torch_mlc.dynamo_backend.export.targets import this_machine

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.skipif(this_machine() != "x86-64", reason="on AArch64 all other tests are of it"),
]
CODES = {"float32": (2, 32), "int64": (0, 64), "bool": (6, 8)}


class Model(nn.Module):
    """A convolution, products of many rows and of one, attention, a norm, exponentials, a sort, and state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(64, 96), nn.Linear(96, 64)
        self.norm = nn.LayerNorm(64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, images: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        q = self.norm(x)[None, None]
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0]
        y = y + self.down(F.gelu(self.up(y)))
        return y, self.conv(images).sin(), torch.topk(y, 5).values, self.calls


def arguments(rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    return torch.randn(rows, 64), torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module")
def program() -> tuple[ExportedProgram, Model]:
    torch.manual_seed(0)
    model = Model().eval()
    return export(model, arguments(8), dynamic_shapes=({0: Dim("rows", min=1, max=512)}, None)), model


@pytest.fixture(scope="module")
def folder(program: tuple[ExportedProgram, Model], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arm")
    return torch_mlc.export(program[0], path, targets=("aarch64",), name="arm")


def section(data: bytes, name: str) -> bytes:
    head = HEADER.unpack_from(data)
    rows = [SECTION_HEADER.unpack_from(data, head[6] + k * SECTION_HEADER.size) for k in range(head[12])]
    names = rows[head[13]][4]
    for row in rows:
        start = names + row[0]
        if data[start : data.index(b"\0", start)].decode() == name:
            return data[row[4] : row[4] + row[5]]
    raise AssertionError(f"no section {name}")


def test_code_is_that_of_the_processor(folder: Path) -> None:
    """Vectors of four float32 (NEON), multiplied and added in one instruction, and none of later extensions."""
    data = (folder / "model.so").read_bytes()
    assert HEADER.unpack_from(data)[2] == 183  # EM_AARCH64
    text = section(data, ".text")
    words = struct.unpack(f"<{len(text) // 4}I", text[: len(text) // 4 * 4])
    lanes = sum(w & 0xFFA0FC00 == 0x4E20CC00 for w in words)  # fmla vD.4s, vN.4s, vM.4s
    element = sum(w & 0xFFC0F400 == 0x4F801000 for w in words)  # fmla vD.4s, vN.4s, vM.s[lane]
    assert lanes + element > 20
    scalable = sum(w & 0x1E000000 == 0x04000000 and w >> 29 in (1, 3) for w in words)  # SVE's encodings
    assert scalable < len(words) // 1000
    told = (folder / "model.json").read_text()
    assert '"machine": "aarch64"' in told and '"processor": "generic"' in told


@pytest.mark.skipif(shutil.which("readelf") is None, reason="there is no readelf")
def test_tables_are_what_loaders_expect(folder: Path) -> None:
    told = subprocess.run(["readelf", "-Wa", folder / "model.so"], capture_output=True, text=True).stdout
    assert not re.search("warning|error:|TEXTREL", told, re.IGNORECASE)
    kinds = set(re.findall(r"R_AARCH64_\w+", told))
    assert kinds <= {"R_AARCH64_RELATIVE", "R_AARCH64_GLOB_DAT", "R_AARCH64_JUMP_SLOT", "R_AARCH64_ABS64",
                     "R_AARCH64_TLSDESC", "R_AARCH64_TLS_DTPMOD64", "R_AARCH64_TLS_DTPREL64", "R_AARCH64_TLS_TPREL64",
                     "R_AARCH64_GLOB_DA", "R_AARCH64_JUMP_SL", "R_AARCH64_RELATIV"}  # fmt: skip
    outside = set(re.findall(r"GLOBAL DEFAULT\s+UND (\w+)", told))
    assert outside and outside <= IMPORTS


def test_the_command_exports_for_it(program: tuple[ExportedProgram, Model], tmp_path: Path) -> None:
    torch.export.save(program[0], tmp_path / "model.pt2")
    command = ["export", str(tmp_path / "model.pt2"), "--out", str(tmp_path / "out"), "--targets", "aarch64"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert HEADER.unpack_from((tmp_path / "out" / "model.so").read_bytes())[2] == 183
    done = CliRunner().invoke(cli, [*command[:-1], "aarch64,x86-64-v3"])
    assert done.exit_code == 1 and "a library is for one instruction set" in done.output


def test_targets_that_are_none(program: tuple[ExportedProgram, Model], tmp_path: Path) -> None:
    for targets, told in (
        (("aarch64", "host"), "a library is for one instruction set"),
        (("sparc",), r"targets= takes processors, of 'host', 'x86-64', .*, 'aarch64', or GPUs, .* and 'sparc' is none"),
        (("hip:gfx942",), "libraries launch through NVIDIA's driver, and there are none for AMD's GPUs"),
        (("cuda:sm_12",), "targets= has 'cuda:sm_12': no target"),
        (("cuda:sm_90", "host", "x86-64-v2"), "of a library for GPUs one processor launches"),
        (("cuda:sm_90", "cuda:sm_90a"), "name a GPU twice"),
    ):
        with pytest.raises(torch_mlc.ExportError, match=told):
            torch_mlc.export(program[0], tmp_path / "no", targets=targets)
    assert not (tmp_path / "no").exists()


@needs_arm
def test_numbers_under_qemu(folder: Path, program: tuple[ExportedProgram, Model], tmp_path: Path) -> None:
    source = Path(__file__).with_name("runner.c")
    runner = tmp_path / "runner"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Werror", f"-I{folder}"]
    subprocess.run([ARM_GCC, *flags, source, folder / "model.so", "-lpthread", "-lm", "-o", runner], check=True)
    for rows in (8, 1, 129):
        given = arguments(rows)
        write_inputs(tmp_path / "in", given)
        command = [
            str(QEMU),
            "-L",
            ARM_ROOT,
            str(runner),
            str(folder),
            "0",
            str(tmp_path / "in"),
            str(tmp_path / "out"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.stdout == "done\n", done.stdout + done.stderr
        data = (tmp_path / "out").read_bytes()
        model = Model().eval()
        model.load_state_dict(program[1].state_dict())
        for _ in range(2):  # the second call sees the state of the first
            with torch.no_grad():
                for wanted in model(*given):
                    nbytes = wanted.numel() * wanted.element_size()
                    found, data = np.frombuffer(data[:nbytes], wanted.numpy().dtype), data[nbytes:]
                    np.testing.assert_allclose(found.reshape(wanted.shape), wanted.numpy(), rtol=1e-4, atol=1e-4)
        assert not data


def write_inputs(path: Path, tensors: Sequence[Tensor]) -> None:
    parts = [struct.pack("<i", len(tensors))]
    for t in tensors:
        code, bits = CODES[str(t.dtype).removeprefix("torch.")]
        parts += [struct.pack(f"<3i{t.dim()}q", code, bits, t.dim(), *t.shape), t.contiguous().numpy().tobytes()]
    path.write_bytes(b"".join(parts))
