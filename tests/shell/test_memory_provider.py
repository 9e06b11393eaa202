"""The provider in memory, which stands in for pods in other tests, passes the suite of the real ones."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from firepool_broker.conformance.providers import ProviderConformance
from firepool_broker.core.ids import Sku, TemplateDigest
from firepool_broker.core.pools import Pool
from firepool_broker.shell.ports import PodOrder
from tests.shell.memory_provider import MemoryProvider


class MemoryWorld:
    """Providers over one folder, each the next broker's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: MemoryProvider | None = None

    def new_provider(self) -> MemoryProvider:
        self._last = MemoryProvider(self._folder, self._last)
        return self._last

    def order(self, name: str, **more: Any) -> PodOrder:
        pool = Pool(sku=Sku("cpu"), template=TemplateDigest("t1"), **more)
        return PodOrder(name=name, pool=pool, template="t1")

    async def kill(self, name: str) -> None:
        assert self._last is not None
        await self._last.kill(name)

    async def close(self) -> None:
        if self._last is not None:
            await self._last.aclose(leave_pods=False)


@pytest.fixture
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MemoryWorld]:
    made = MemoryWorld(tmp_path_factory.mktemp("p"))
    yield made
    await made.close()


class TestMemoryProvider(ProviderConformance):
    """The suite against pods that are objects."""
