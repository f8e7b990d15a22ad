"""The pass manager runs, checks, dumps and times; and says which pass it was."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from torch_mlc.ir.graph.graph import Compute, IRModule
from torch_mlc.ir.passes import PassError, PassManager
from torch_mlc.ir.text.parser import parse
from torch_mlc.ir.text.printer import show

TEXT = """module(main='main')
@graph
def main(x: float32[4]):
    y = compute(float32[4], lambda i0: exp(x[i0]))
    z = compute(float32[4], lambda i0: neg(x[i0]))
    return (z,)
"""


def module() -> IRModule:
    made = parse(TEXT)
    assert isinstance(made, IRModule)
    return made


@dataclass(frozen=True)
class EliminateDead:
    name: str = "eliminate_dead"

    def run(self, module: IRModule) -> IRModule:
        nodes = tuple(n for n in module.graph.nodes if n.names[0] in module.graph.outputs)
        return IRModule({"main": replace(module.graph, nodes=nodes)})


@dataclass(frozen=True)
class Nothing:
    name: str = "nothing"

    def run(self, module: IRModule) -> IRModule:
        return module


@dataclass(frozen=True)
class Break:
    name: str = "break"

    def run(self, module: IRModule) -> IRModule:
        nodes = tuple(replace(n, axes=()) for n in module.graph.nodes if isinstance(n, Compute))
        return IRModule({"main": replace(module.graph, nodes=nodes)})


@dataclass(frozen=True)
class Crash:
    name: str = "crash"

    def run(self, module: IRModule) -> IRModule:
        raise KeyError("lost")


def test_passes_run_in_order_and_are_dumped(tmp_path: Path) -> None:
    seen: list[tuple[str, bool]] = []
    manager = PassManager(
        [EliminateDead(), Nothing()], tmp_path, on_pass=lambda n, s, c: seen.append((n, c)) if s >= 0 else None
    )
    after = manager.run(module())
    assert [n.names for n in after.graph.nodes] == [("z",)]
    assert seen == [("eliminate_dead", True), ("nothing", False)]
    files = sorted(p.name for p in (tmp_path / "main").iterdir())
    assert files == ["00_input.txt", "01_eliminate_dead.txt", "02_nothing.txt"]
    assert parse((tmp_path / "main" / "00_input.txt").read_text()) == module()
    assert (tmp_path / "main" / "01_eliminate_dead.txt").read_text() == show(after)


def test_a_pass_that_breaks_a_rule_is_named(tmp_path: Path) -> None:
    with pytest.raises(PassError) as caught:
        PassManager([Nothing(), Break()], tmp_path).run(module())
    text = str(caught.value)
    assert text.startswith("pass break: main: 0 axes and a shape of 1 dimensions") and "^ here" in text
    assert "02_break_broken.txt" in text
    assert parse((tmp_path / "main" / "02_break_failed.txt").read_text()) == module()


def test_a_pass_that_raises_is_named_and_its_input_kept(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="pass crash: 'lost'") as caught:
        PassManager([Crash()], tmp_path).run(module())
    assert isinstance(caught.value.__cause__, KeyError)
    assert parse((tmp_path / "main" / "01_crash_failed.txt").read_text()) == module()


def test_broken_input_is_not_blamed_on_a_pass() -> None:
    with pytest.raises(PassError, match="the input of the passes: main: 0 axes"):
        PassManager([Nothing()]).run(Break().run(module()))


def test_without_verifier_and_dumps() -> None:
    broken = PassManager([Break()], verify=False).run(module())
    assert broken.graph.nodes[0].axes == ()
