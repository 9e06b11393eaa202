"""A fake broker for every test, and a program that is connected to it; afterwards no thread or process is left."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import firepool
from tests.sdk.fake_broker import FakeBroker


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREPOOL_HOME", str(tmp_path / "home"))
    for name in ("FIREPOOL_ADDRESS", "FIREPOOL_TOKEN", "FIREPOOL_PROFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    broker = FakeBroker()
    try:
        yield broker
    finally:
        firepool.shutdown()
        broker.close()
        assert not [t.name for t in threading.enumerate() if t.name in ("firepool-sender", "firepool-events")]


@pytest.fixture
def connected(broker: FakeBroker) -> FakeBroker:
    firepool.init(broker.address)
    return broker
