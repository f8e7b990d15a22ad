"""The demo's own parts, with eager in the backend's place where the backend is not what is tested."""

import io
import math

import pytest
import torch
from rich.console import Console

from torch_mlc.dynamo_backend.demo import run as demo
from torch_mlc.dynamo_backend.demo.model import GPT, ModelShape
from torch_mlc.dynamo_backend.demo.report import steps_to_show
from torch_mlc.dynamo_backend.demo.run import Training, run
from torch_mlc.dynamo_backend.demo.text import batches, load_corpus
from torch_mlc.dynamo_backend.demo.train import new_trainer, training_batches


def test_the_text_round_trips_and_is_split() -> None:
    corpus = load_corpus()
    assert corpus.decode(corpus.training[:14]) == "First Citizen:"
    assert len(corpus.training) > 8 * len(corpus.held_out) > 800_000
    assert int(corpus.training.max()) < len(corpus.alphabet) == 65


def test_batches_repeat_with_their_seed_and_targets_are_one_ahead() -> None:
    tokens = torch.arange(1000)
    first, again, other = (next(batches(tokens, 4, 16, seed, "cpu")) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert torch.equal(first[1], first[0] + 1)


def test_the_model_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = GPT(ModelShape(vocabulary=11, context=8, layers=2, heads=2, width=16)).double()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    a, b = model.hidden(tokens), model.hidden(changed)
    assert torch.equal(a[:, :5], b[:, :5]) and not torch.equal(a[:, 5:], b[:, 5:])
    assert torch.allclose(model.next_logits(tokens), (a @ model.tokens.weight.T)[:, -1])


def test_training_learns_and_repeats_with_its_seed() -> None:
    corpus = load_corpus()
    losses = []
    for steps in (8, 2):
        trainer, data = new_trainer(None, corpus, "cpu", 8, 3), training_batches(corpus, "cpu", 3)
        for _ in range(steps):
            trainer.step(*next(data))
        losses.append(trainer.losses)
    assert losses[0][:2] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] == pytest.approx(math.log(65), abs=0.3)  # untrained: close to a guess among 65 characters
    assert losses[0][-1] < losses[0][0] - 0.4


@pytest.mark.parametrize("total", [1, 2, 7, 300])
def test_the_table_shows_the_first_and_the_last_step(total: int) -> None:
    shown = steps_to_show(total)
    assert shown[0] == 1 and shown[-1] == total and shown == sorted(set(shown))


def test_a_short_demo_prints_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TIMED_ROUNDS", 2)
    monkeypatch.setattr(demo, "SAMPLE_LENGTH", 60)
    console = Console(file=io.StringIO(), width=120)
    run(Training(steps=2, device="cpu", seed=0, inductor=False, backend="eager"), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for part in ("written by the model", "held-out text", "+0.0e+00", "kernel launches a step", "Where to look next"):
        assert part in text
