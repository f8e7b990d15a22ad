"""What an edit of a model leaves of its lock file: all lines but those of what was edited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dynamo_backend.locking.lock_models import Block
from tests.dynamo_backend.locking.locks import explained
from torch_mlc.dynamo_backend.locking.lock_text import SCHEDULES, LockLine, LockText
from torch_mlc.dynamo_backend.locking.names import GRAPH


class Part(nn.Module):
    def __init__(self, width: int = 32, activation: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(32, width), nn.Linear(width, 32), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Renamed(Part):
    """The same with variables of other names."""

    def forward(self, given: Tensor) -> Tensor:
        wide = self.up(given)
        active = self.activation(wide)
        return self.down(active)


class Net(nn.Module):
    """Parts by their names, then a head."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleDict(parts), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return torch.softmax(self.head(x), -1)


def entries(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """Of each section the lines with those that they are below; a schedule is one."""

    def walk(line: LockLine, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        here = (*above, line.text)
        if above[:1] == (SCHEDULES,):
            yield (*here, *(step.text for step in line.below))
            return
        yield here
        for below in line.below:
            yield from walk(below, here)

    text = LockText.parse(path.read_text(), path)
    return {
        name.partition("(")[0] + name.rpartition(")")[2]: [
            entry for part, lines in s.tree().items() for line in lines for entry in walk(line, (part,))
        ]
        for name, s in text.sections.items()
    }


def locked(model: nn.Module, path: Path, training: bool) -> dict[str, list[tuple[str, ...]]]:
    torch.manual_seed(0)
    explained(model, (torch.randn(2, 8, 32),), path, training=training)
    return entries(path)


def changed(before: list[tuple[str, ...]], after: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Entries that one has and the other has not."""
    a, b = Counter(before), Counter(after)
    return [*(a - b).elements(), *(b - a).elements()]


def in_order(entries: list[tuple[str, ...]], among: Counter[tuple[str, ...]]) -> list[tuple[str, ...]]:
    left = Counter(among)
    kept = []
    for entry in entries:
        if left[entry]:
            left[entry] -= 1
            kept.append(entry)
    return kept


PARTS = {"first": Part, "second": Part, "third": Part}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("edit", "edited"),
    [
        ({"second": lambda: Part(activation=F.silu)}, ("parts.second",)),
        ({"second": lambda: Part(width=48)}, ("parts.second",)),
        ({"second": Renamed}, ()),
        # Its gradients need those of the next, which were nobody's before.
        ({"before": Part}, ("parts.before", "parts.first")),
        # What is weighed of a neighbour (rows in blocks) depends on what is next to it.
        ({"second": Block}, ("parts.second", "parts.first")),
    ],
    ids=["activation", "width", "variables", "inserted", "other"],
)
def test_only_lines_of_what_was_edited_change(
    edit: dict[str, Callable[[], nn.Module]], edited: tuple[str, ...], training: bool, tmp_path: Path
) -> None:
    parts = {"before": edit["before"], **PARTS} if "before" in edit else {**PARTS, **edit}
    before = locked(Net(**{k: make() for k, make in PARTS.items()}), tmp_path / "before", training)
    after = locked(Net(**{k: make() for k, make in parts.items()}), tmp_path / "after", training)
    assert before.keys() == after.keys() and len(before) == 1 + training
    for name in before:
        found = changed(before[name], after[name])
        assert bool(found) is bool(edited), name
        # Launches that parts share have lines of several.
        shared = {e[1] for e in (*before[name], *after[name]) if "launched as one" in e}
        for part, *texts in found:
            if part == "saved" and texts[0].startswith("forward: "):  # autograd saves views that torch gives no module
                continue
            if part != SCHEDULES and texts[0] not in (*shared, GRAPH):  # schedules have the names of no part
                assert any(e in text for e in edited for text in texts), (name, part, texts)
        one, other = ([e for e in lines[name] if e[1] not in shared] for lines in (before, after))
        both = Counter(one) & Counter(other)
        if "backward" not in name:  # whose order goes by the memory of all of it
            assert in_order(one, both) == in_order(other, both), "unrelated lines are in another order"
        kept = [e for e in after[name] if e[0] != SCHEDULES and not any(p in t for p in edited for t in e)]
        assert len([e for e in kept if "parts.third" in " ".join(e)]) > 3, "the example has nothing that stays"


def test_layers_that_repeat_are_told_as_if_written_out(tmp_path: Path) -> None:
    """Nine layers are planned as a loop; the lines of each are those that it has among a few."""

    class Layers(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def made(count: int) -> list[tuple[str, ...]]:
        (found,) = locked(Layers(count), tmp_path / str(count), training=False).values()
        return found

    few, many, more = made(4), made(9), made(12)
    for entry in few:
        texts = " ".join(entry)
        if "layers.3" not in texts and "layers.4" not in texts:  # the last has no layer behind it
            assert entry in many and entry in more, entry
    for layer in range(1, 8):
        one = [e for e in many if f"layers.{layer}" in " ".join(e)]
        other = [e for e in few if "layers.1" in " ".join(e)]
        renamed = [tuple(_moved(t, layer - 1) for t in e) for e in other]
        assert sorted(one) == sorted(renamed), layer


def _moved(text: str, by: int) -> str:
    for k in (2, 1, 0):
        text = text.replace(f"layers.{k}", f"layers.<{k + by}>")
    return text.replace("<", "").replace(">", "")
