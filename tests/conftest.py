"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.distributed.ranks import end_crowded_workers

settings.register_profile("busy machine", parent=settings.default, deadline=None)
settings.load_profile("busy machine")


@pytest.fixture(scope="module", autouse=True)
def no_crowded_workers() -> Iterator[None]:
    """Rank processes that a module leaves full of dead groups would slow the next ones down."""
    yield
    end_crowded_workers()
