"""Dumps and logs of what only compiling tells are there however warm the caches are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._logging import set_logs

from torch_mlc.runtime.log import asks_for_stages


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warm caches, on disk and in memory, of this process and of torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    monkeypatch.setenv("MLC_CACHE_DIR", str(tmp_path / "mlc"))
    with functorch_config.patch(enable_autograd_cache=True):
        for _ in range(2):
            step()
        yield
    torch._dynamo.reset()


def f(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1).sum() + x.sin().sum()


def step() -> None:
    torch._dynamo.reset()
    x, w = torch.randn(5, 4), torch.randn(4, 6, requires_grad=True)
    torch.compile(f, backend="mlc")(x, w).backward()


def test_a_dump_is_written_whatever_the_caches_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("first", "second"):
        monkeypatch.setenv("MLC_DUMP_DIR", str(tmp_path / folder))
        step()
        graphs = {
            p.name.split("__")[-1].split("_")[1]: {f.name for f in p.iterdir()} for p in (tmp_path / folder).iterdir()
        }
        assert graphs.keys() == {"joint", "forward", "backward"}
        assert {name.split("_", 1)[1] for name in graphs.pop("joint")} == {"input.py"}
        for files in graphs.values():
            kinds = {name.split("_")[1].partition(".")[0] for name in files}
            assert {"import", "partition", "schedule", "emit", "host", "decompose"} <= kinds, files


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.text: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        name = record.name.rpartition("__")[2]
        self.text[name] = self.text.get(name, "") + record.getMessage() + "\n"


@pytest.mark.parametrize("topics", [("output_code",), ("fusion", "schedule")], ids=str)
def test_torchs_logs_answer_with_our_text(topics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    parent = logging.getLogger("torch")
    monkeypatch.setattr(parent, "handlers", [heard])
    try:
        set_logs(**dict.fromkeys(topics, True))
        parent.addHandler(heard)
        step()
    finally:
        set_logs()
    assert set(topics) == heard.text.keys() & {"output_code", "fusion", "schedule"}
    wanted = {
        "output_code": ("host program of", "def call(args):", "define void @fused_", " for cpu:"),
        "fusion": (" nodes in ", "i0 = row(5)", " do not line up"),
        "schedule": ("rule cpu_", "s.vectorize("),
    }
    for topic in topics:
        for word in wanted[topic]:
            assert word in heard.text[topic], (topic, word, heard.text[topic])


def test_topics_of_our_own_log_ask_for_stages(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not asks_for_stages(("cache", "timing")) and asks_for_stages(("cache", "schedule"))
    monkeypatch.setenv("MLC_LOG", "schedule")
    step()
    assert "[mlc schedule]" in capfd.readouterr().err
