"""Numerics by place: names, the order of entries, caches, and what is told of entries that are for nothing."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_mlc
from torch_mlc.dynamo_backend.aten_passes import lists
from torch_mlc.dynamo_backend.aten_passes.context import FAST as FAST_ATEN
from torch_mlc.dynamo_backend.reports.numerics_uses import NumericsWarning
from torch_mlc.runtime.settings.options import OptionError, Options
from torch_mlc.scheduler import passes
from torch_mlc.scheduler.context import FAST as FAST_GRAPH
from torch_mlc.scheduler.numerics import (
    ATEN_REWRITES,
    FAST_REWRITES,
    REWRITES,
    NumericsByPlace,
    NumericsError,
    NumericsPlace,
    nearest,
    parse_places,
)

GELU = NumericsPlace("aten.gelu.default", "net.py:12 in forward: x = gelu(x)", "h.0.mlp")


def test_the_list_of_rewrites_is_that_of_the_passes() -> None:
    aten = [p for n in dir(lists) if n.endswith("_PASSES") for p in getattr(lists, n)]
    fast = {p.name for p in aten if FAST_ATEN in p.needs} | {
        p.name for p in passes.GRAPH_PASSES if FAST_GRAPH in p.needs
    }
    assert fast == set(FAST_REWRITES)
    names = {p.name for p in aten} | {p.name for p in passes.GRAPH_PASSES}
    assert set(REWRITES) <= names
    assert set(ATEN_REWRITES) == set(REWRITES) & {p.name for p in aten}


def test_a_key_survives_edits_elsewhere_and_is_one_for_all_layers() -> None:
    moved = NumericsPlace("aten.gelu.default", "net.py:99 in forward: x = gelu(x)", "h.11.mlp")
    assert moved.key == GELU.key and moved.name("rounding", layer=True) != GELU.name("rounding", layer=True)
    others = (
        NumericsPlace("aten.gelu.default", "net.py:12 in forward: y = gelu(x)", "h.0.mlp"),
        NumericsPlace("aten.gelu.default", GELU.line, "h.0.attention"),
        NumericsPlace("aten.relu.default", GELU.line, "h.0.mlp"),
        NumericsPlace("aten.gelu.default", GELU.line, "h.0.mlp", backward=True),
    )
    assert len({GELU.key, *(o.key for o in others)}) == 5


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ({}, ()),
        ({"default": "eager"}, ("function", "rounding")),
        ({"net.py:12": "eager"}, ("function", "rounding")),
        ({"net.py:1": "eager"}, ()),
        ({"aten.gelu": "eager"}, ("function", "rounding")),
        ({"gelu": "eager", "net.py:12": "fast"}, ()),
        ({GELU.name("op"): "eager"}, ("op",)),
        ({GELU.name("rounding"): "eager"}, ("rounding",)),
        ({GELU.name("rounding"): "eager", GELU.name("rounding", layer=True): "fast"}, ()),
        ({"default": "eager", GELU.name("function"): "fast"}, ("rounding",)),
        ({f"{GELU.name('rounding')}@h.1.mlp": "eager"}, ()),
    ],
)
def test_the_nearer_entry_decides(entries: dict[str, str], kept: tuple[str, ...]) -> None:
    assert parse_places(entries).kept(GELU) == kept


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"gelu": "egaer"}, "'egaer' is neither 'fast' nor 'eager' Did you mean 'eager'"),
        ({"roundin:0123456789abcdef": "eager"}, "no kind 'roundin'.*Did you mean 'rounding'"),
        ({"rounding:12": "eager"}, "16 hex digits"),
        ({"rewrite:substitut": "eager"}, "Did you mean 'substitute'"),
        ({"a b": "eager"}, "names no place"),
    ],
)
def test_a_wrong_entry_is_an_error_with_the_nearest_right_one(entries: dict[str, str], told: str) -> None:
    with pytest.raises(NumericsError, match=told):
        parse_places(entries)
    with pytest.raises(OptionError, match="MLC_NUMERICS"):
        Options.resolve(None, {"numerics": entries}, {})


def test_the_nearest_place_is_named() -> None:
    assert "net.py:12" in nearest("net.py:13", [GELU]) and "gelu" in nearest("aten.gellu.default", [GELU])
    assert nearest("something", [GELU]) == ""


def test_numerics_are_read_from_a_file_and_are_part_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "numerics.json"
    path.write_text(json.dumps({"default": "eager", "gelu": "fast"}))
    found = Options.resolve(None, {}, {"MLC_NUMERICS": str(path)})
    assert found.numerics == NumericsByPlace((("gelu", "fast"),), "eager")
    assert found.fingerprint() != Options.resolve(None, {}, {}).fingerprint()
    assert Options.resolve(None, {"numerics": "eager"}, {}).numerics == "eager"
    assert Options.resolve(None, {}, {}).numerics == "fast"
    with pytest.raises(OptionError, match="No such file"):
        Options.resolve(None, {"numerics": str(tmp_path / "none.json")}, {})
    path.write_text("[1]")
    with pytest.raises(OptionError, match="a JSON object"):
        Options.resolve(None, {"numerics": str(path)}, {})


def f(x: Tensor, w: Tensor) -> Tensor:
    y = (x * 1.7 + 0.3) * x
    return F.gelu(y @ w)


def run(numerics: object, *args: Tensor, **options: object) -> Tensor:
    torch._dynamo.reset()
    made: Tensor = torch.compile(f, backend="mlc", options={"numerics": numerics, **options})(*args)
    return made


def test_programs_of_other_numerics_are_others_in_the_cache() -> None:
    x, w = torch.randn(40, 48).bfloat16(), torch.randn(48, 32).bfloat16()
    want = [run(n, x, w, cache=False) for n in ("fast", "eager", {"aten.mul": "eager"})]
    assert len({t.float().sum().item() for t in want}) > 1
    for _ in range(2):
        for n, t in zip(("fast", "eager", {"aten.mul": "eager"}), want, strict=True):
            assert torch.equal(run(n, x, w), t)


def test_eagers_own_ops_run_in_native_programs_too() -> None:
    x, w = torch.randn(40, 48), torch.randn(48, 32)
    places = torch_mlc.attribute(f, x, w).rows
    entries = {n: "eager" for r in places for n in r.entries}
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="mlc", options={"numerics": entries, "host_program": "native"})
    for _ in range(3):
        assert torch.equal(compiled(x, w), f(x, w))


def test_an_entry_for_nothing_is_told_with_the_nearest_place() -> None:
    x, w = torch.randn(40, 48).bfloat16(), torch.randn(48, 32).bfloat16()
    with pytest.warns(NumericsWarning, match=r"'aten.gellu.default' of numerics is for no place.*'aten.gelu.default'"):
        run({"aten.gellu.default": "eager"}, x, w)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericsWarning)
        run({"aten.gelu.default": "eager"}, x, w)


def test_explain_tells_what_is_kept_and_what_is_for_nothing() -> None:
    x, w = torch.randn(40, 48).bfloat16(), torch.randn(48, 32).bfloat16()
    report = torch_mlc.explain(f, x, w, options={"numerics": {"aten.gelu": "eager", "nets.py:1": "eager"}})
    (kept,) = report.graphs[0].numerics
    assert kept.startswith("function, rounding of aten.gelu.default at test_numerics.py:")
    assert "keeps eager's function, rounding of aten.gelu.default" in str(report)
    assert "the entry 'nets.py:1' of numerics is for no kernel here" in str(report)


def test_one_layer_alone_keeps_eagers() -> None:
    torch.manual_seed(0)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 1.7 + 0.3) * x * 0.1

    model = nn.Sequential(*(Block() for _ in range(3)))
    x = torch.randn(64, 64).bfloat16()
    made = torch_mlc.attribute(model, x, layers=True)
    layers = {n.partition("@")[2] for r in made.rows for n in r.entries if "@" in n}
    assert layers <= {"0", "1", "2"} and len(layers) >= 2
    assert sum(r.share for r in made.rows) == pytest.approx(1.0)
    (name,) = next(r for r in made.rows if len(r.layers) == 1 and any("@1" in n for n in r.entries)).entries
    torch._dynamo.reset()
    one = torch.compile(model, backend="mlc", options={"numerics": {name: "eager"}})(x)
    torch._dynamo.reset()
    every = torch.compile(model, backend="mlc", options={"numerics": {name.partition("@")[0]: "eager"}})(x)
    assert not torch.equal(one, every)
