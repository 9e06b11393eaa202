"""The API over real HTTP."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.world import World, world


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[World]:
    """A running API."""
    async with world(tmp_path) as running:
        yield running
