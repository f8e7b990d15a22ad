"""Lock files of small models for machines of fixed figures: a change of a decision is seen in review.

``pytest tests/dynamo_backend/locking --update-golden`` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.dynamo_backend.locking.lock_models import GPU, MODELS, TARGETS, LockModel
from tests.dynamo_backend.locking.locks import explained
from torch_mlc.runtime import targets

# What ATen graphs hold is torch's, and so is what is asked of it: these are of the version that CI has.
pytestmark = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written with torch 2.13")


def written(model: LockModel, path: Path, **options: object) -> str:
    torch.manual_seed(0)
    call, inputs = model.make()
    explained(call, inputs, path, training=model.training, dynamic=model.dynamic, options=options)
    return path.read_text()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_cpu(
    name: str, target: str, tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "cpu_target", lambda *_: TARGETS[target])
    golden(f"{name}_{target}", written(MODELS[name], tmp_path / "model.mlc.lock"))


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.gpu])
def test_gpu(name: str, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}_sm_90", written(MODELS[name], tmp_path / "model.mlc.lock", target=GPU))


def test_both_targets_of_a_model_lie_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.mlc.lock"
    texts = []
    for target in TARGETS.values():
        monkeypatch.setattr(targets, "cpu_target", lambda *_, target=target: target)
        texts.append(written(MODELS["softmax"], path))
    text = written(MODELS["softmax"], path, target=GPU)
    headings = [line for line in text.splitlines() if line.startswith("graph ")]
    assert [h.partition(" on ")[2] for h in headings] == [
        "cpu x86-64-v3 of 256 bits, 4 threads",
        "cpu x86-64-v4 of 512 bits, 4 threads",
        "cuda:sm_90 of 132 multiprocessors",
    ]
    assert texts[0].rstrip("\n") in text, "a section for one target moves no line of another"
