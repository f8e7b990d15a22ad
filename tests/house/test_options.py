"""Settings: which source wins, what values mean, and that a wrong name or value names the nearest right one."""

import dataclasses
from pathlib import Path

import pytest

from torch_mlc.runtime.settings.options import (
    MODES,
    OptionError,
    Options,
    option_specs,
    options_markdown,
    options_table,
    typed_value,
    variables_in,
)
from torch_mlc.runtime.settings.variables import near_name


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
        (None, None, {"TORCH_MLC_TUNEE": "1"}, "'TORCH_MLC_TUNE'"),
    ],
)
def test_a_wrong_name_or_value_names_the_nearest(
    mode: str | None, given: dict[str, object] | None, environ: dict[str, str], nearest: str
) -> None:
    with pytest.raises(OptionError, match=f"Did you mean {nearest}"):
        Options.resolve(mode, given, environ)


NEAR = {
    "MLC_TUNNE": "MLC_TUNE", "MLC_TUEN": "MLC_TUNE", "MLC_TUN": "MLC_TUNE", "MLC_LGO": "MLC_LOG", "MLC_LOGS": "MLC_LOG",
    "MLC_CACHEDIR": "MLC_CACHE_DIR", "MLC_CACHE_DIRS": "MLC_CACHE_DIR", "MLC_DIR_CACHE": "MLC_CACHE_DIR",
    "MLC__CACHE_DIR_": "MLC_CACHE_DIR", "MLC_cache_dir": "MLC_CACHE_DIR", "MLC_CUDAGRAPH": "MLC_CUDA_GRAPHS",
    "MLC_CUDA_GRAPH": "MLC_CUDA_GRAPHS", "MLC_SCHEDULE": "MLC_SCHEDULES", "MLC_FALBACK_RANDON": "MLC_FALLBACK_RANDOM",
    "MLC_TUNE_BUGDET": "MLC_TUNE_BUDGET", "MLC_REMOTE_CACHE": "MLC_CACHE_REMOTE", "MLC_THREAD": "MLC_THREADS",
    "MLC_DUMPDIR": "MLC_DUMP_DIR", "MLC_NUMRICSS": "MLC_NUMERICS", "MLC_TARGETS": "MLC_TARGET",
}  # fmt: skip
FOREIGN = [
    # mlc-llm, and what it and mlc-ai's packages build with
    "MLC_LLM_HOME", "MLC_JIT_POLICY", "MLC_TEMP_DIR", "MLC_DOWNLOAD_CACHE_POLICY", "MLC_LLM_READONLY_WEIGHT_CACHE",
    "MLC_LLM_SOURCE_DIR", "MLC_MULTI_ARCH", "MLC_INTERNAL_PRESHARD_NUM", "MLC_DISABLE_KERNELS",
    # data sets, cluster managers and what anybody may call a variable
    "MLC_DEBUG", "MLC_DATA_DIR", "MLC_HOME", "MLC_HOST", "MLC_PORT", "MLC_TOKEN", "MLC_API_KEY", "MLC_LOG_LEVEL",
    "MLC_VERSION", "MLC_SIZE", "MLC_LLM", "MLC_LOW", "MLC_TEST_PADDING", "MLC_CACHE_PATH", "MLC_NUM_THREADS", "MLC_",
]  # fmt: skip


@pytest.mark.parametrize(("variable", "meant"), NEAR.items())
def test_a_near_miss_of_a_variable_is_an_error_that_names_it(variable: str, meant: str) -> None:
    with pytest.raises(OptionError, match=rf"no environment variable '{variable}'\. Did you mean '{meant}'\?"):
        Options.resolve(None, None, {variable: "1"})


def test_variables_of_other_projects_are_left_alone() -> None:
    environ = dict.fromkeys(FOREIGN, "anything")
    assert Options.resolve(None, None, environ) == Options()
    assert variables_in(environ).foreign == tuple(sorted(FOREIGN))


def test_no_setting_is_a_near_miss_of_another() -> None:
    names = [spec.variable for spec in option_specs()]
    for name in names:
        others = [other for other in names if other != name]
        assert near_name(name, others) == ""


def test_every_setting_is_read_under_its_longer_name_which_goes_first() -> None:
    assert Options.resolve(None, None, {"TORCH_MLC_THREADS": "3", "MLC_THREADS": "2"}).threads == 3
    assert Options.resolve(None, None, {"TORCH_MLC_THREADS": " ", "MLC_THREADS": "2"}).threads == 2
    texts = {spec.variable: "nonsense ü" for spec in option_specs()}
    for plain in texts:
        if plain not in ("MLC_CACHE_DIR", "MLC_DUMP_DIR", "MLC_LOCK"):  # any text is a path
            with pytest.raises(OptionError, match=f"(TORCH_{plain}=nonsense|schedules|decisions)"):
                Options.resolve(None, None, {f"TORCH_{plain}": texts[plain]})


@pytest.mark.parametrize("variable", ["TORCH_MLC_LLM_HOME", "TORCH_MLC_HOST", "TORCH_MLC_"])
def test_an_unknown_longer_name_is_an_error_though_nothing_is_near(variable: str) -> None:
    with pytest.raises(OptionError, match=f"no environment variable '{variable}'. Valid: TORCH_MLC_TUNE, .*unset it"):
        Options.resolve(None, None, {variable: "1"})


def test_a_suggestion_is_made_only_where_something_is_near() -> None:
    with pytest.raises(OptionError, match=r"mode is an argument of torch\.compile itself") as caught:
        Options.resolve(None, {"mode": "max-autotune"}, {})
    assert "Did you mean" not in str(caught.value)
    with pytest.raises(OptionError, match=r"no option 'epilogue_fusion'\. Valid: ") as caught:
        Options.resolve(None, {"epilogue_fusion": True}, {})
    assert "Did you mean" not in str(caught.value)


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
    changes |= {
        "fallback_random": True,
        "loss_chunk": 512,
        "memory_limit": "8GiB",
        "copy_streams": False,
        "tune_numerics": "same",
        "cpu_products": "blas",
        "libraries": "none",
        "decisions": {"product:ab": "loops"},
        "regions": "16",
    }
    keeps = {"tune_budget": 1.0, "cache_dir": "/x", "cache": False, "dump_dir": "/y", "log": "timing"}
    keeps |= {
        "schedules": {"abcdef": print},
        "cache_size": "1GiB",
        "cache_remote": "memory://x",
        "host_program": "native",
        "early_launches": False,
        "cuda_graphs": True,
        "cuda_graph_shapes": 2,
        "cuda_graph_copies": False,
        "compile_workers": 99,
        "cpu_pool": "1GiB",
        "freeze": True,  # the graph that is compiled is another one
        "freeze_discard": True,
        "lock": "/z",
        "lock_mode": "use",
    }
    assert set(changes) | set(keeps) == {field.name for field in dataclasses.fields(Options)}
    prints = {Options.resolve(None, {name: value}, {}).fingerprint() for name, value in changes.items()}
    assert len(prints | {Options().fingerprint()}) == len(changes) + 1
    assert Options.resolve(None, keeps, {}).fingerprint() == Options().fingerprint()


@pytest.mark.parametrize("given", [{}, {"cpu_pool": 0, "memory_limit": "3GiB", "loss_chunk": 0, "tune_budget": 0.5}])
def test_values_are_shown_as_they_are_typed(given: dict[str, object]) -> None:
    options = Options.resolve(None, given, {})
    for spec in option_specs():
        value = getattr(options, spec.name)
        if value is not None and value != ():
            assert spec.parse(typed_value(spec, value)) == value


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
