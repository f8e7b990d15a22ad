"""Where a GPU's driver library is looked for, over maps of processes that are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torch_mlc.runtime.gpu import driver as gpu_driver
from torch_mlc.runtime.gpu.driver import CDriver, GpuDriverError
from torch_mlc.runtime.gpu.libraries import NoGpuLibrary, library_names, load_driver_library

MAPS = """55d4-55d5 r--p 00000000 08:01 42                                 /usr/bin/python3.11
7f01-7f02 rw-p 00000000 00:00 0
7f02-7f03 r-xp 00000000 08:01 43                                 {0}
7f03-7f04 r--p 00001000 08:01 43                                 {0}
7f05-7f06 r-xp 00000000 08:01 44                                 /usr/lib/libcudart.so.12
7f06-7f07 r-xp 00000000 08:01 45                                 /opt/venv/torch/lib/libtorch_cuda.so
7f08-7f09 r-xp 00000000 00:00 0                                  [vdso]
"""


def maps(tmp_path: Path, mapped: str) -> Path:
    found = tmp_path / "maps"
    found.write_text(MAPS.format(mapped))
    return found


def loaded(kind: str, there: set[str], tmp_path: Path, mapped: str = "[heap]") -> tuple[str, list[str]]:
    """The library that is loaded where those of ``there`` are, and what was tried."""
    tried: list[str] = []

    def load(name: str) -> str:
        tried.append(name)
        if name not in there:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    return load_driver_library(kind, maps=maps(tmp_path, mapped), folder=tmp_path / "lib", load=load), tried


@pytest.mark.parametrize(("kind", "path"), [
    ("hip", "/opt/venv/torch/lib/libamdhip64.so"),
    ("hip", "/opt/rocm-6.4.0/lib/libamdhip64.so.6.4.60400"),
    ("hip", "/opt/rocm-7.0.0/lib/libamdhip64.so.7"),
    ("hip", "/opt/venv/torch/lib/libamdhip64-8f1ad2bb.so.6"),
    ("hip", "/srv/a user/a torch/lib/libamdhip64.so"),
    ("cuda", "/usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15"),
    ("cuda", "/usr/lib/wsl/drivers/nv_dispi.inf_amd64_1a2b/libcuda.so.1.1"),
    ("cuda", "/usr/local/cuda/compat/libcuda.so.1"),
])  # fmt: skip
def test_what_is_mapped_is_taken_before_all_else(kind: str, path: str, tmp_path: Path) -> None:
    there = {path, "libcuda.so.1", "libamdhip64.so"}
    assert loaded(kind, there, tmp_path, path) == (path, [path])


def test_torchs_own_folder_comes_next(tmp_path: Path) -> None:
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("libamdhip64-0a1b2c3d.so.7.1", "libhiprtc.so.7", "libamdhip64.txt"):
        (folder / name).touch()
    path = str(folder / "libamdhip64-0a1b2c3d.so.7.1")
    assert loaded("hip", {path, "libamdhip64.so"}, tmp_path) == (path, [path])
    assert loaded("cuda", {"libcuda.so.1"}, tmp_path)[1] == ["libcuda.so.1"]


@pytest.mark.parametrize(("kind", "name"), [
    ("hip", "libamdhip64.so.6"), ("hip", "libamdhip64.so.7"), ("cuda", "/usr/lib/wsl/lib/libcuda.so.1"),
])  # fmt: skip
def test_the_loader_is_asked_for_versions(kind: str, name: str, tmp_path: Path) -> None:
    assert loaded(kind, {name}, tmp_path)[0] == name


def test_a_mapped_file_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    """Its name may be another library by now."""
    there = {"libcuda.so.1", "/usr/lib/libcuda.so.570.86.15"}
    assert loaded("cuda", there, tmp_path, "/usr/lib/libcuda.so.570.86.15 (deleted)")[0] == "libcuda.so.1"


def test_without_maps_names_are_tried(tmp_path: Path) -> None:
    names = list(library_names("hip", tmp_path / "none", tmp_path / "none"))
    assert names[0] == "libamdhip64.so" and not any("cuda" in n for n in names)


@pytest.mark.parametrize(("kind", "mend"), [("hip", "ROCm"), ("cuda", "NVIDIA's driver")])
def test_nothing_is_an_error_that_says_where_it_was_looked_for(kind: str, mend: str, tmp_path: Path) -> None:
    with pytest.raises(NoGpuLibrary, match=f"no {kind} driver on this machine") as told:
        loaded(kind, set(), tmp_path, "/opt/libcuda.so.1" if kind == "cuda" else "/opt/libamdhip64.so.6")
    text = str(told.value)
    assert mend in text and all(f"{n}: cannot open" in text for n in library_names(kind, tmp_path, tmp_path))
    assert "/opt/lib" in text


def test_a_driver_that_is_not_there_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(kind: str) -> Any:
        raise NoGpuLibrary(f"no {kind} driver on this machine (…)")

    monkeypatch.setattr(gpu_driver, "load_driver_library", none)
    with pytest.raises(GpuDriverError, match="no hip driver on this machine"):
        CDriver("hip")
