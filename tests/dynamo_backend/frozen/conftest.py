"""What the tests of frozen parameters share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield
