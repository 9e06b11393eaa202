"""A broker that the tests of one module share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.wheels import source, wheel
from tests.e2e.process import broker
from tests.e2e.venue import Venue, pools_file


@pytest.fixture(scope="module")
def wheelhouse() -> Iterator[Path]:
    """Wheels and sources of packages that no index has; not below /tmp, which every job has to itself."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="firepool-wheels-") as name:
        yield _filled(Path(name))


def _filled(folder: Path) -> Path:
    folder.chmod(0o755)
    wheel(folder, "alpha", "1.0", {"alpha.py": "version = 1\n"})
    wheel(folder, "shadow", "1.0", {"colorsys.py": "fake = True\n"})
    wheel(folder, "pathy", "1.0", {"pathy.py": "", "pathy.pth": "import sys; sys.pathy = 'its .pth was read'\n"})
    source(folder, "broken", action="raise SystemExit('this build cannot work')")
    return folder


@pytest.fixture(scope="module")
def venue(tmp_path_factory: pytest.TempPathFactory, wheelhouse: Path) -> Iterator[Venue]:
    home = tmp_path_factory.mktemp("home")
    with broker(home, "--pools", pools_file(home, wheelhouse)) as one:
        yield Venue(one)
