"""The place that machines share: what one folder has not, another gives; a place that fails is done without."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from torch_mlc.runtime.cache import remote_cache
from torch_mlc.runtime.cache.cache import DiskCache
from torch_mlc.runtime.cache.entry import Entry
from torch_mlc.runtime.cache.remote_cache import CacheLevels, RemoteCache
from torch_mlc.runtime.log import CacheWarning
from torch_mlc.runtime.settings.options import OptionError, Options

KEY = "ab" * 32
ENTRY = Entry("kernel", KEY, {"schedule": [1, "x"]}, b"\x00code\n\xff", "softmax")


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield f"memory://{uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}/shared"


def written(place: RemoteCache, entry: Entry = ENTRY) -> None:
    place.write(entry)
    place.finish()


def test_an_entry_comes_back_on_another_machine(url: str, tmp_path: Path) -> None:
    first = CacheLevels(DiskCache(tmp_path / "first"), RemoteCache(url))
    assert first.read("kernel", KEY) is None
    first.write(ENTRY)
    assert first.remote is not None
    first.remote.finish()
    second = CacheLevels(DiskCache(tmp_path / "second"), RemoteCache(url))
    assert second.read("kernel", KEY) == ENTRY
    assert DiskCache(tmp_path / "second").read("kernel", KEY) == ENTRY, "what is fetched once stays"


@pytest.mark.parametrize("change", ["truncate", "flip", "foreign", "empty"])
def test_a_damaged_entry_is_compiled_anew(url: str, change: str) -> None:
    place = RemoteCache(url)
    written(place)
    path = f"{url}/v1/kernel/{KEY}"
    with fsspec.open(path, "rb") as file:
        data = file.read()
    bad = {"truncate": data[:-3], "flip": data[:-1] + b"!", "foreign": b"\x7fELF" + data, "empty": b""}[change]
    with fsspec.open(path, "wb") as file:
        file.write(bad)
    with pytest.warns(CacheWarning, match="anew"):
        assert place.read("kernel", KEY) is None
    written(place)
    assert place.read("kernel", KEY) == ENTRY


def test_a_place_that_fails_is_warned_of_once() -> None:
    place = RemoteCache("file:///proc/no/such/place")
    with pytest.warns(CacheWarning, match="going on without it"):
        written(place)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(place)
        assert place.read("kernel", KEY) is None


def test_a_place_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_cache, "ANSWER_SECONDS", 0.2)
    place = RemoteCache("memory://slow")
    monkeypatch.setattr(place, "_place", lambda: time.sleep(30))
    start = time.monotonic()
    with pytest.warns(CacheWarning, match="no answer"):
        assert place.read("kernel", KEY) is None
    place.finish()
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("url", ["no url", "s4://bucket/folder", "file://", 7])
def test_what_is_no_url_is_refused(url: object) -> None:
    with pytest.raises(OptionError, match="cache_remote"):
        Options.resolve(None, {"cache_remote": url}, {})


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("4GiB", 4 << 30), ("2gb", 2 * 10**9), ("77", 77)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert Options.resolve(None, None, {"MLC_CACHE_SIZE": text}).cache_size == size


@pytest.mark.parametrize("text", ["0", "-1", "4 bananas", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="cache_size"):
        Options.resolve(None, {"cache_size": text}, {})
