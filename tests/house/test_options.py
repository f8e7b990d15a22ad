"""Settings: which source wins, what values mean, and that a wrong name or value names the nearest right one."""

import dataclasses
from pathlib import Path

import pytest

from torch_mlc.runtime.options import MODES, OptionError, Options, option_specs, options_markdown, options_table


def test_defaults_need_nothing() -> None:
    options = Options.resolve(None, None, {})
    assert options == Options()
    assert not options.tune and options.cache and options.tune_budget == 60.0 and options.numerics == "fast"
    assert options.cache_dir.name == "torch_mlc"


def test_torch_compile_goes_over_the_environment_over_defaults() -> None:
    environ = {"MLC_TUNE_BUDGET": "2m", "MLC_NUMERICS": "eager", "UNRELATED": "x"}
    options = Options.resolve(None, {"tune_budget": "500ms"}, environ)
    assert (options.tune_budget, options.numerics, options.tune) == (0.5, "eager", False)


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_max_autotune_tunes(mode: str) -> None:
    assert Options.resolve(mode, None, {"MLC_TUNE": "0"}).tune


def test_reduce_overhead_captures() -> None:
    assert Options.resolve("reduce-overhead", None, {}) == Options(cuda_graphs=True)
    assert not Options.resolve("reduce-overhead", {"cuda_graphs": False}, {}).cuda_graphs


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("MLC_TUNE", "1", True),
        ("MLC_COMPILE_WORKERS", "0", 0),
        ("MLC_COMPILE_WORKERS", "12", 12),
        ("MLC_TUNE", "off", False),
        ("MLC_TUNE", "", False),
        ("MLC_CACHE", "false", False),
        ("MLC_TUNE_BUDGET", "1.5m", 90.0),
        ("MLC_TUNE_BUDGET", "30", 30.0),
        ("MLC_TARGET", "cuda:sm_90", "cuda:sm_90"),
        ("MLC_TARGET", "HIP:gfx942", "hip:gfx942"),
        ("MLC_VERIFY", "1", 1),
        ("MLC_LOG", "schedule,timing", ("timing", "schedule")),
        ("MLC_THREADS", "4", 4),
        ("MLC_DUMP_DIR", "dumps", Path.cwd() / "dumps"),
        ("MLC_CACHE_DIR", "~/kept", Path.home() / "kept"),
    ],
)
def test_values_from_the_environment(variable: str, text: str, value: object) -> None:
    name = next(spec.name for spec in option_specs() if spec.variable == variable)
    assert getattr(Options.resolve(None, None, {variable: text}), name) == value


def test_values_from_torch_compile_may_be_python_objects() -> None:
    given = {"tune": True, "tune_budget": 5, "threads": None, "log": ["cache"], "dump_dir": Path("/x"), "target": None}
    options = Options.resolve(None, given, {"MLC_THREADS": "3"})
    assert (options.tune, options.tune_budget, options.threads) == (True, 5.0, None)
    assert (options.log, options.dump_dir) == (("cache",), Path("/x"))


@pytest.mark.parametrize(
    ("mode", "given", "environ", "nearest"),
    [
        ("max-autotunes", None, {}, "'max-autotune'"),
        (None, {"tun": 1}, {}, "'tune'"),
        (None, {"tune_buget": "1s"}, {}, "'tune_budget'"),
        (None, None, {"MLC_CACHE_DIRS": "/x"}, "'MLC_CACHE_DIR'"),
        (None, None, {"MLC_LOG": "timing,shedule"}, "'schedule'"),
        (None, None, {"MLC_TARGET": "cuda:sm90"}, "'cuda:sm_90'"),
        (None, {"numerics": "eagre"}, {}, "'eager'"),
        (None, {"tune": "tru"}, {}, "'true'"),
    ],
)
def test_a_wrong_name_or_value_names_the_nearest(
    mode: str | None, given: dict[str, object] | None, environ: dict[str, str], nearest: str
) -> None:
    with pytest.raises(OptionError, match=f"Did you mean {nearest}"):
        Options.resolve(mode, given, environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tune", 2),
        ("tune_budget", "0s"),
        ("tune_budget", "-1s"),
        ("tune_budget", "ten"),
        ("tune_budget", True),
        ("cache_dir", ""),
        ("cache_dir", None),
        ("dump_dir", 3),
        ("verify", 3),
        ("verify", True),
        ("threads", 0),
        ("threads", "many"),
        ("log", 7),
        ("target", "tpu"),
    ],
)
def test_a_bad_value_says_what_is_valid(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=rf"(?s){name}.*Valid: ") as caught:
        Options.resolve(None, {name: value}, {})
    assert isinstance(caught.value, ValueError)


def test_the_fingerprint_holds_what_changes_code_and_nothing_else() -> None:
    changes = {"tune": True, "target": "cpu", "verify": 1, "numerics": "eager", "threads": 2, "strict": True}
    changes |= {"fallback_random": True, "loss_chunk": 512, "memory_limit": "8GiB"}
    keeps = {"tune_budget": 1.0, "cache_dir": "/x", "cache": False, "dump_dir": "/y", "log": "timing"}
    keeps |= {
        "schedules": {"abcdef": print},
        "cache_size": "1GiB",
        "cache_remote": "memory://x",
        "host_program": "native",
        "cuda_graphs": True,
        "cuda_graph_shapes": 2,
        "cuda_graph_copies": False,
        "compile_workers": 99,
    }
    assert set(changes) | set(keeps) == {field.name for field in dataclasses.fields(Options)}
    prints = {Options.resolve(None, {name: value}, {}).fingerprint() for name, value in changes.items()}
    assert len(prints | {Options().fingerprint()}) == len(changes) + 1
    assert Options.resolve(None, keeps, {}).fingerprint() == Options().fingerprint()


def test_options_are_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().tune = True  # type: ignore[misc]
    assert len({Options(), Options(), Options(tune=True)}) == 2


def test_every_mode_sets_fields_that_exist() -> None:
    names = {field.name for field in dataclasses.fields(Options)}
    assert all(set(fields) <= names for fields in MODES.values())


def test_the_committed_pages_are_up_to_date(repository: Path, request: pytest.FixtureRequest) -> None:
    page, readme = repository / "docs" / "options.md", repository / "README.md"
    before, _, rest = readme.read_text().partition("<!-- options -->\n")
    _, _, after = rest.partition("<!-- /options -->")
    wanted = f"{before}<!-- options -->\n{options_table()}<!-- /options -->{after}"
    if request.config.getoption("--update-golden"):
        page.write_text(options_markdown())
        readme.write_text(wanted)
    assert page.read_text() == options_markdown(), "run pytest tests/house --update-golden"
    assert readme.read_text() == wanted, "run pytest tests/house --update-golden"
