"""The disk cache: what was written comes back, and nothing else ever does."""

import os
import warnings
from pathlib import Path

import pytest

from tests import warm_processes
from torch_mlc.runtime.cache.cache import DiskCache, Entry
from torch_mlc.runtime.log import CacheWarning

KEY = "ab" * 32
ENTRY = Entry("kernel", KEY, {"schedule": [1, "x"]}, b"\x00code\n\xff", "softmax")


def entry_file(folder: Path) -> Path:
    return folder / "v1" / "kernel" / KEY


def test_an_entry_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    assert cache.read("kernel", KEY) is None
    assert cache.write(ENTRY)
    assert DiskCache(tmp_path).read("kernel", KEY) == ENTRY
    (listed,) = cache.entries()
    assert (listed.kind, listed.key, listed.description) == ("kernel", KEY, "softmax")
    assert cache.size_bytes() == listed.size == entry_file(tmp_path).stat().st_size
    assert cache.clear() == 1 and cache.entries() == []


def test_folders_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    DiskCache(tmp_path / "new").write(ENTRY)
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("change", ["truncate", "flip", "foreign", "empty", "other key"])
def test_a_damaged_entry_is_never_used(tmp_path: Path, change: str) -> None:
    cache = DiskCache(tmp_path)
    cache.write(ENTRY)
    path = entry_file(tmp_path)
    data = path.read_bytes()
    if change == "other key":
        cache.write(Entry("kernel", "cd" * 32, {}))
        data = (path.parent / ("cd" * 32)).read_bytes()
    path.write_bytes(
        {
            "truncate": data[:-3],
            "flip": data[:-2] + bytes([data[-2] ^ 1]) + data[-1:],
            "foreign": b"\x7fELF" + data,
            "empty": b"",
            "other key": data,
        }[change]
    )
    with pytest.warns(CacheWarning, match="anew"):
        assert DiskCache(tmp_path).read("kernel", KEY) is None
    assert not path.exists()


def test_damage_is_warned_of_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for key in (KEY, "cd" * 32):
        cache.write(Entry("kernel", key, {}))
        (tmp_path / "v1" / "kernel" / key).write_bytes(b"?")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.read("kernel", KEY) is None and cache.read("kernel", "cd" * 32) is None
    assert len(caught) == 1


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file" / "cache")
    with pytest.warns(CacheWarning, match="cannot write"):
        assert not cache.write(ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.write(ENTRY)
        with cache.lock("kernel", KEY):
            pass


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    DiskCache(tmp_path).write(ENTRY)
    os.chmod(tmp_path / "v1", 0o777)
    with pytest.warns(CacheWarning, match="chmod 700"):
        cache = DiskCache(tmp_path)
    assert cache.read("kernel", KEY) is None and not cache.write(ENTRY)


def test_above_the_limit_the_entries_used_longest_ago_go(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, limit=5000)
    keys = [f"{k:02x}" for k in range(8)]
    for age, key in enumerate(keys[:4]):
        cache.write(Entry("kernel", key, {}, bytes(1000)))
        os.utime(tmp_path / "v1" / "kernel" / key, (1000 + age, 1000 + age))
    assert cache.read("kernel", keys[0]) is not None  # now the last used
    cache.write(Entry("kernel", keys[4], {}, bytes(1000)))
    kept = {e.key for e in cache.entries()}
    assert keys[0] in kept and keys[4] in kept and keys[1] not in kept
    assert cache.size_bytes() <= 5000


def test_processes_that_write_the_same_key_leave_one_whole_entry(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from torch_mlc.runtime.cache.cache import DiskCache, Entry\n"
        "cache = DiskCache(Path(sys.argv[1]))\n"
        "for k in range(200):\n"
        "    cache.write(Entry('kernel', 'ab' * 32, {'k': k}, bytes([int(sys.argv[2])]) * 50000))\n"
        "    e = cache.read('kernel', 'ab' * 32)\n"
        "    assert e is not None and len(set(e.payload)) == 1 and len(e.payload) == 50000\n"
    )
    for child in [warm_processes.start(script, str(tmp_path), str(n)) for n in (1, 2)]:
        child.output()
    assert [p.name for p in (tmp_path / "v1" / "kernel").iterdir()] == [KEY]
