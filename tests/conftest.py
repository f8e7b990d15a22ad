"""What every test may lean on: strict settings, a cache folder of its own, goldens, and no GPU tests without a GPU."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.net.commit import part_of

settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("house")

_CACHE = pytest.StashKey[TemporaryDirectory[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")
    parser.addoption("--tenth", type=int, help="only the tests of this part, 0 to 9 (tests/net)")


def pytest_configure(config: pytest.Config) -> None:
    """Settings go through the environment, so that the processes that tests start have them too."""
    # Compilers leave many objects alive; to look through all of them again and again takes a tenth of the time.
    gc.set_threshold(100_000, 50, 100)
    for name in [name for name in os.environ if name.startswith(("MLC_", "TORCH_MLC_"))]:
        del os.environ[name]
    config.stash[_CACHE] = TemporaryDirectory(prefix="torch_mlc_tests_")
    os.environ["MLC_STRICT"] = "1"
    # Several workers share the machine. None starts further ones, but for the tests that are about them.
    os.environ["MLC_COMPILE_WORKERS"] = "0"
    # What is printed of a program is the same on all processors.
    os.environ["MLC_CPU_PRODUCTS"] = "blas"
    # A team that waits should not keep the others from theirs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["MLC_CACHE_DIR"] = config.stash[_CACHE].name
    # AOTAutograd's cache too: tests are about what is compiled, not about what an earlier run left.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(config.stash[_CACHE].name, "torch"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores, at most 4: some tests wait for processes that they start. None for the net, whose
    parts have processes of their own and are run one after another.
    """
    if config.option.markexpr == "net":
        return 0
    return min(4, (os.cpu_count() or 1) + 1)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is there by now stays. Collections of garbage leave it out, which took 0.4 s to look through each time."""
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(_CACHE, None)
    if folder is not None:
        folder.cleanup()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (tenth := config.getoption("--tenth")) is not None:
        others = [item for item in items if part_of(item.nodeid) != tenth]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if part_of(item.nodeid) == tenth]
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """`golden(name, text)`: text equals tests/<room>/golden/<name>.txt; --update-golden writes that file instead."""

    def check(name: str, text: str) -> None:
        path = Path(request.path).parent / "golden" / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} does not exist; make it with pytest --update-golden"
        assert text == path.read_text(), f"differs from {path}; if it should, run pytest --update-golden"

    yield check


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
