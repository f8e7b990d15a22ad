"""Random numbers of exported models: each context draws them from a generator that can be seeded."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F

import torch_mlc
from torch_mlc.runtime.export.open import LibraryError

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Draws(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), torch.randn_like(x), F.dropout(x, 0.25, training=True), torch.rand(())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = export(Draws(), (torch.ones(9, 100),), dynamic_shapes=({0: Dim("rows", min=0, max=10_000)},))
    return torch_mlc.export(program, tmp_path_factory.mktemp("draws"))


def test_numbers_have_their_distributions(folder: Path) -> None:
    loaded = torch_mlc.load(folder)
    uniform, normal, dropped, one = loaded(torch.ones(5000, 100))
    assert uniform.min() >= 0 and uniform.max() < 1 and 0 <= one < 1
    assert abs(uniform.mean() - 0.5) < 2e-3 and abs(uniform.var() - 1 / 12) < 1e-3
    assert abs(normal.mean()) < 6e-3 and abs(normal.var() - 1) < 1e-2
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((dropped == 0).float().mean() - 0.25) < 3e-3
    assert abs(torch.corrcoef(torch.stack([uniform.flatten(), normal.flatten()]))[0, 1]) < 6e-3


def test_seeds_repeat(folder: Path) -> None:
    loaded, x = torch_mlc.load(folder), torch.ones(3, 100)
    first, second = loaded(x), loaded(x)
    assert not torch.equal(first[0], second[0])
    loaded.seed(0)  # what a context begins with
    for a, b in zip((first, second), (loaded(x), loaded(x)), strict=True):
        assert all(map(torch.equal, a, b))
    loaded.seed(-7)
    other = loaded(x)
    assert not torch.equal(other[0], first[0])
    loaded.seed(-7)
    assert all(map(torch.equal, loaded(x), other))
    loaded.reset()
    assert all(map(torch.equal, loaded(x), first))


def test_threads_have_generators_of_their_own(folder: Path) -> None:
    loaded, x, found = torch_mlc.load(folder), torch.ones(3, 100), {}

    def draw(seed: int) -> None:
        loaded.seed(seed)
        found[seed] = [loaded(x)[0] for _ in range(5)]

    threads = [threading.Thread(target=draw, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for seed, values in found.items():
        loaded.seed(seed)
        assert all(torch.equal(v, loaded(x)[0]) for v in values)
    assert len({v.sum().item() for values in found.values() for v in values}) == 20


def test_models_without_random_numbers_have_no_seed(tmp_path: Path) -> None:
    torch_mlc.export(export(nn.ReLU(), (torch.ones(3),)), tmp_path)
    with pytest.raises(LibraryError, match="model has no random numbers"):
        torch_mlc.load(tmp_path).seed(3)
    assert "model_seed" not in (tmp_path / "model.h").read_text()
