"""A model from torch.export to a folder and back: as tensors' functions, in a process without torch, by the command."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F

import torch_mlc
from torch_mlc.dynamo_backend.cli.main import cli
from torch_mlc.ir.errors import OutOfRangeError
from torch_mlc.runtime.compile.arguments import CallError
from torch_mlc.runtime.export import open as opened

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Attention(nn.Module):
    """Attention over a cache of fixed length, which it writes to."""

    def __init__(self, size: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.head = heads, size // heads
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size)
        self.register_buffer("keys", torch.zeros(1, heads, length, self.head))
        self.register_buffer("values", torch.zeros(1, heads, length, self.head))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (y.view(n, t, self.heads, self.head).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        seen = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        return self.out(seen.transpose(1, 2).reshape(n, t, d))


class Decoder(nn.Module):
    def __init__(self, words: int = 31, size: int = 16, layers: int = 2, length: int = 12) -> None:
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(words, size)
        self.blocks = nn.ModuleList(Attention(size, 2, length) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(layers))
        self.last = nn.Linear(size, words)

    def forward(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        mask = torch.arange(self.length)[None, :] <= positions[:, None]
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x), positions, mask)
        return {"logits": self.last(x[:, -1])}


def programs(model: nn.Module) -> dict[str, Any]:
    time = Dim("time", min=1, max=12)
    tokens, positions = torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)
    return {
        "prefill": export(model, (tokens, positions), dynamic_shapes=({1: time}, {0: time})),
        "decode": export(model, (tokens[:, :1], positions[:1])),
    }


def test_two_functions_with_one_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    eager = copy.deepcopy(model)
    assert torch_mlc.export(programs(model), tmp_path / "decoder", name="decoder") == tmp_path / "decoder"
    loaded = torch_mlc.load(tmp_path / "decoder")
    assert set(loaded.functions) == {"prefill", "decode"}

    def agree(function: str, tokens: Tensor, positions: Tensor) -> None:
        with torch.no_grad():
            wanted = eager(tokens, positions)
        found = loaded.functions[function](tokens, positions)
        assert found.keys() == {"logits"}
        torch.testing.assert_close(found["logits"], wanted["logits"])

    for length in (5, 8, 1):
        agree("prefill", torch.randint(0, 31, (1, length)), torch.arange(length))
        for position in range(length, length + 3):
            agree("decode", torch.randint(0, 31, (1, 1)), torch.tensor([position]))
    told = json.loads((tmp_path / "decoder" / "model.json").read_text())
    assert told["weights"]["blocks.0.keys"]["state"] and not told["weights"]["embed.weight"]["state"]
    assert told["functions"]["prefill"]["sizes"].popitem()[1]["most"] == 12
    state, fresh = loaded.decode(torch.tensor([[3]]), torch.tensor([0])), copy.deepcopy(model)
    loaded.reset()
    with torch.no_grad():
        wanted = fresh(torch.tensor([[3]]), torch.tensor([0]))
    torch.testing.assert_close(loaded.decode(torch.tensor([[3]]), torch.tensor([0])), wanted)
    del state


RUN = """
import sys
sys.path.insert(0, sys.argv[2])
import numpy as np
from open import ModelLibrary
given = np.load(sys.argv[1] + "/calls.npz")
library = ModelLibrary(sys.argv[1] + "/decoder")
context = library.context()
for k in range(int(given["count"])):
    (logits,) = context.call(str(given[f"name{k}"]), given[f"tokens{k}"], given[f"positions{k}"])
    np.testing.assert_allclose(logits, given[f"logits{k}"], rtol=1e-5, atol=1e-5)
assert not any(m.split(".")[0] in ("torch", "torch_mlc") for m in sys.modules), "torch was imported"
print("same")
"""


def test_a_process_without_torch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Decoder().eval()
    eager = copy.deepcopy(model)
    torch_mlc.export(programs(model), tmp_path / "decoder")
    calls: dict[str, Any] = {"count": 4}
    for k, (name, positions) in enumerate(
        (("prefill", range(6)), ("decode", [6]), ("decode", [7]), ("prefill", [8, 9]))
    ):
        tokens, at = torch.randint(0, 31, (1, len(positions))), torch.tensor([*positions])
        with torch.no_grad():
            logits = eager(tokens, at)["logits"]
        calls |= {f"name{k}": name, f"tokens{k}": tokens, f"positions{k}": at, f"logits{k}": logits}
    np.savez(tmp_path / "calls.npz", **calls)
    folder = str(Path(opened.__file__).parent)
    command, env = [sys.executable, "-c", RUN, str(tmp_path), folder], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.strip() == "same", done.stderr


def test_wrong_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch_mlc.export(programs(Decoder()), tmp_path)
    loaded = torch_mlc.load(tmp_path)
    tokens, positions = torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)
    for args, why in (
        ((tokens,), "the arguments are laid out as"),
        ((tokens, positions[:4]), "prefill: dimension 0 of input 1 \\(positions\\) is 4"),
        ((tokens.int(), positions), "tokens is of torch.int32; it has to be of torch.int64"),
        ((tokens[0], positions), "prefill: input 0 \\(tokens\\) has 1 dimensions"),
        ((torch.zeros(1, 13, dtype=torch.int64), torch.arange(13)), "is 13; it has to be at most 12"),
        ((tokens, [1, 2]), "the arguments are laid out as|of type list"),
        ((tokens.to("meta"), positions), "tokens is on meta"),
    ):
        with pytest.raises(CallError, match=why):
            loaded.prefill(*args)
    with pytest.raises(OutOfRangeError) as caught:
        loaded.prefill(tokens + 40, positions)
    note = "".join(getattr(caught.value, "__notes__", caught.value.args))
    assert "In the model: test_library.py" in note
    with pytest.raises(CallError, match="several functions; call one of prefill, decode"):
        loaded(tokens, positions)
    with pytest.raises(AttributeError, match="no function 'encode'"):
        loaded.encode  # noqa: B018
    assert "prefill(tokens: int64[1, " in repr(loaded.prefill)


def test_named_tuples_are_plain_ones(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"sorted": x.sort(-1), "most": x.max(0)}

    x = torch.randn(5, 9)
    torch_mlc.export(export(Model(), (x,)), tmp_path)
    found = torch_mlc.load(tmp_path)(x)
    assert type(found["sorted"]) is tuple
    for name, pair in Model()(x).items():
        torch.testing.assert_close(found[name], tuple(pair))


class Trees(nn.Module):
    """Arguments and results that are trees, with numbers among them."""

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, more: dict[str, Tensor]) -> Any:
        a, b = pair
        return [a + b, {"scaled": a * scale, "more": (more["x"] - 1, None)}], a.t()


def test_trees_of_arguments(tmp_path: Path) -> None:
    model = Trees()
    a, b, x = torch.randn(3, 4), torch.randn(3, 4), torch.randn(2)
    torch_mlc.export(export(model, ((a, b),), {"scale": 2.5, "more": {"x": x}}), tmp_path)
    loaded = torch_mlc.load(tmp_path)
    torch.testing.assert_close(loaded((a, b), more={"x": x}, scale=2.5), model((a, b), scale=2.5, more={"x": x}))
    with pytest.raises(CallError, match=r"with 2\.5"):
        loaded((a, b), scale=3.5, more={"x": x})


def test_convolutions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, stride=2),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    )  # fmt: skip
    model(torch.randn(8, 3, 20, 20))
    model.eval()
    x = torch.randn(2, 3, 20, 20)
    torch_mlc.export(export(model, (x,), dynamic_shapes=({0: Dim("n", max=16)},)), tmp_path)
    loaded = torch_mlc.load(tmp_path)
    with torch.no_grad():
        for n in (1, 2, 7):
            x = torch.randn(n, 3, 20, 20)
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)


def test_variants_for_processors(tmp_path: Path) -> None:
    """Kernels for several processors, of which the one at hand chooses, give the same."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 7), nn.Softmax(-1)), torch.randn(9, 40)
    program = export(model, (x,))
    with torch.no_grad():
        wanted = model(x)
    for number, targets in enumerate((("x86-64",), ("x86-64-v3", "x86-64"), ("host", "x86-64-v4", "x86-64-v2"))):
        torch_mlc.export(program, tmp_path / str(number), targets=targets)
        torch.testing.assert_close(torch_mlc.load(tmp_path / str(number))(x), wanted)
    told = json.loads((tmp_path / "2" / "model.json").read_text())
    assert told["targets"][0]["processor"] == "x86-64-v2" and len(told["targets"]) == 3


def test_threads_have_state_of_their_own(tmp_path: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.total += x
            return self.total * 2

    torch_mlc.export(export(Counter(), (torch.zeros(3),)), tmp_path)
    loaded = torch_mlc.load(tmp_path)
    found: dict[int, Tensor] = {}

    def count(thread: int) -> None:
        for _ in range(50):
            found[thread] = loaded(torch.full((3,), float(thread)))

    threads = [threading.Thread(target=count, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {k: float(v[0]) for k, v in found.items()} == {k: 100.0 * k for k in range(4)}


def test_the_command(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    x = torch.randn(3, 6)
    torch.export.save(export(model, (x,)), tmp_path / "net.pt2")
    done = CliRunner().invoke(
        cli, ["export", str(tmp_path / "net.pt2"), "--out", str(tmp_path / "net"), "--name", "net"]
    )
    assert done.exit_code == 0, done.output
    assert "model.so" in done.output and "net_call" in (tmp_path / "net" / "model.h").read_text()
    torch.testing.assert_close(torch_mlc.load(tmp_path / "net")(x), model(x).detach())

    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x).abs()

    torch.export.save(export(Spectrum(), (x,)), tmp_path / "spectrum.pt2")
    done = CliRunner().invoke(cli, ["export", f"spectrum={tmp_path / 'spectrum.pt2'}", "--out", str(tmp_path / "no")])
    assert done.exit_code == 1 and "fft" in done.output and not (tmp_path / "no").exists()
    done = CliRunner().invoke(cli, ["export", str(tmp_path / "missing.pt2"), "--out", str(tmp_path / "no")])
    assert done.exit_code == 1 and "missing.pt2" in done.output


def test_a_folder_that_is_written_again_while_it_is_open(tmp_path: Path) -> None:
    """Each library goes on with its own code and weights, and a third that is the second again is the second."""

    class Scale(nn.Module):
        def __init__(self, by: float, size: int) -> None:
            super().__init__()
            self.by, self.weight = by, nn.Parameter(torch.full((size,), by))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.by

    libraries = []
    for by, size in ((1.0, 3), (2.0, 5), (3.0, 5)):
        torch_mlc.export(export(Scale(by, size), (torch.zeros(size),)), tmp_path)
        libraries.append((by, size, opened.ModelLibrary(tmp_path)))
    again = opened.ModelLibrary(tmp_path, verify=True)
    for by, size, library in (*libraries, (3.0, 5, again)):
        (result,) = library.call("forward", np.ones(size, np.float32))
        np.testing.assert_array_equal(result, np.full(size, 2 * by, np.float32))
