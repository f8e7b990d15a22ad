"""Passes of users: where they stand, that they are treated as ours, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import torch_mlc
from torch_mlc.dynamo_backend.compiling.pass_lists import USER_PASSES, pass_lists
from torch_mlc.ir.graph.graph import Graph
from torch_mlc.ir.passes import PassError

OURS = pass_lists()
LEVELS = [level for level, _ in OURS if level not in ("layers", "text", "code")]


@pytest.fixture(autouse=True)
def anew(fresh_compiler: None) -> None:
    """What the code of a function was compiled to is forgotten."""


def names(level: str = "graph") -> list[str]:
    return [p.name for p in getattr(pass_lists(), level)]


def same(graph: Graph) -> Graph:
    return graph


def test_where_passes_stand() -> None:
    ours = [p.name for p in OURS.graph]
    first, last = ours.index("eliminate_dead"), len(ours) - 1 - ours[::-1].index("eliminate_dead")
    assert first < last
    with torch_mlc.register_pass(same) as handle:
        assert names() == [*ours, "same"] and repr(handle) == "<pass same>"
        with torch_mlc.register_pass(same, name="second", before="same"):
            assert names() == [*ours, "second", "same"]
            handle.remove()
            assert names() == [*ours, "second"], "the pass that it stood before is gone"
    with torch_mlc.register_pass(same, before="eliminate_dead"):
        assert names().index("same") == first
    with torch_mlc.register_pass(same, after="eliminate_dead"):
        assert names().index("same") == last + 1
    for level in LEVELS:
        with torch_mlc.register_pass(same, level=level):
            assert names(level) == [*(p.name for p in getattr(OURS, level)), "same"]
    assert pass_lists() == OURS


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_a_training(level: str) -> None:
    seen: list[Any] = []

    def look(subject: Any, context: Any) -> Any:
        seen.append((subject, context))
        return 0 if isinstance(subject, fx.GraphModule) else subject

    def model(x: Tensor) -> Tensor:
        return x.sin().sum()

    x = torch.linspace(0, 1, 12, requires_grad=True)
    options = {"cache": False}
    with torch_mlc.register_pass(look, level=level):
        torch.compile(model, backend="mlc", options=options)(x).backward()
        torch.compile(lambda x: x.sin(), backend="mlc", options=options)(x.detach())
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert len(seen) == {"joint": 1, "forward": 1, "backward": 1, "inference": 1}.get(level, 3)
    assert all(context is not None for _, context in seen)


def compiled(*settings: tuple[str, object]) -> Callable[..., Any]:
    return torch.compile(lambda x: (x + 1).exp(), backend="mlc", options={"cache": False, **dict(settings)})


def drop_nodes(graph: Graph) -> Graph:
    return replace(graph, nodes=())


def test_it_is_dumped_where_it_changed_something(tmp_path: Path) -> None:
    def again(graph: Graph) -> Graph:
        return replace(graph, name=graph.name)

    with torch_mlc.register_pass(again), torch_mlc.register_pass(same):
        compiled(("dump_dir", str(tmp_path)))(torch.ones(3))
    found = [p.name for p in tmp_path.rglob("*.txt")]
    assert any("again" in name for name in found) and not any("same" in name for name in found)


def test_it_is_recorded() -> None:
    with torch_mlc.register_pass(same), torch_mlc.register_pass(lambda gm: 1, name="done", level="inference"):
        (graph,) = torch_mlc.explain(lambda x: (x + 1).exp(), torch.ones(3)).graphs
    steps = {step.name: step.changed for step in graph.steps}
    assert steps["same"] is False and steps["done"] is True


def test_it_is_verified() -> None:
    with (
        torch_mlc.register_pass(drop_nodes),
        pytest.raises(Exception, match="pass drop_nodes: ") as caught,
    ):
        compiled(("verify", 1))(torch.ones(3))
    assert isinstance(caught.value.__cause__ or caught.value.inner_exception, PassError)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("level", "made", "text"),
    [
        ("graph", None, "pass wrong: it gives a NoneType; it must give a Graph"),
        ("inference", None, "pass wrong: it gives a NoneType; it must give how often it rewrote something"),
        ("inference", "x", "pass wrong: it gives a str"),
    ],
)
def test_what_it_gives_is_looked_at(level: str, made: Any, text: str) -> None:
    with torch_mlc.register_pass(lambda subject: made, level=level, name="wrong"), pytest.raises(Exception, match=text):
        compiled()(torch.ones(3))


def test_what_is_refused() -> None:
    def refused(text: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(torch_mlc.RegistrationError, match=text):
            torch_mlc.register_pass(*args, **kwargs)
        assert not USER_PASSES

    refused("there is no level 'grap' of passes .there are joint, .*did you mean graph", same, level="grap")
    refused("there is no level 'code' of passes", same, level="code")
    refused("no pass 'eliminate_ded' of level 'graph' .*did you mean eliminate_dead", same, before="eliminate_ded")
    refused("no pass 'chunk_losses' of level 'graph' .there are widen, simplify_algebra", same, after="chunk_losses")
    refused("one place is enough", same, after="eliminate_dead", before="eliminate_dead")
    refused("there is a pass 'eliminate_dead' of level 'graph' already; give yours", same, name="eliminate_dead")
    refused("needs a name, such as name='my_pass'; '<lambda>' is none", lambda g: g)
    refused("takes 3 arguments; it is given a subject, or that and a context", lambda a, b, c: a, name="three")
    refused("takes 0 arguments", lambda: 1, name="none")
