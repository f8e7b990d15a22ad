"""The pictures of docs/architecture.md are what the script draws, and the rooms stand as the layers are enforced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pictures import path, rooms
from tests.house.test_layers import MAY_IMPORT


@pytest.mark.parametrize("name", ["rooms", "path"])
def test_the_committed_picture_is_up_to_date(name: str, repository: Path, request: pytest.FixtureRequest) -> None:
    drawn = rooms(MAY_IMPORT) if name == "rooms" else path()
    file = repository / "docs" / f"{name}.svg"
    if request.config.getoption("--update-golden"):
        file.write_text(drawn)
    assert file.read_text() == drawn, "run pytest tests/docs --update-golden"


def test_an_arrow_is_an_import() -> None:
    assert rooms(MAY_IMPORT).count("<polyline") == 5
    without = MAY_IMPORT | {"codegen": set()}
    assert rooms(without).count("<polyline") == 4
