"""Code packages and requirements that cannot be used: the user is told why, and the pod is as good as before."""

import stat
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.venue import Venue, archive, archive_of_zeros, digest_of, wrong

pytestmark = [pytest.mark.linux, pytest.mark.slow]


def run_with(venue: Venue, package: bytes, **fields: Any) -> Any:
    """A job that brings this package."""
    return venue.command("/bin/true", package=venue.store(package), **fields)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        pytest.param(archive(("../escape.py", b"x = 1")), "does not lie inside", id="a path that leaves it"),
        pytest.param(archive(("/etc/passwd", b"x = 1")), "does not lie inside", id="an absolute path"),
        pytest.param(archive(("link", b"/etc/passwd"), kind=stat.S_IFLNK), "is a link or a device", id="a symlink"),
        pytest.param(archive(("disk", b""), kind=stat.S_IFBLK), "is a link or a device", id="a device"),
        pytest.param(b"no archive at all", "cannot be unpacked", id="not a zip"),
    ],
)
def test_an_archive_that_is_not_plain_files_is_refused_whole(venue: Venue, package: bytes, words: str) -> None:
    body = run_with(venue, package)
    wrong(body, "PackageError", "user")
    assert words in body["error"]["message"]
    assert body["exit_code"] is None, "nothing of it ever ran"
    assert venue.recovered(body) == "verified"


def test_a_zip_bomb_is_refused_by_its_size(venue: Venue) -> None:
    bomb = archive_of_zeros(entries=40, each=64 << 20)
    assert len(bomb) < 4 << 20
    body = run_with(venue, bomb)
    assert wrong(body, "PackageError", "user")["limit_bytes"] == 2_000_000_000, body["error"]
    assert venue.recovered(body) == "verified"


def test_a_package_larger_than_its_pod_is_refused_and_leaves_it_usable(venue: Venue) -> None:
    body = run_with(venue, archive_of_zeros(entries=1, each=64 << 20), sku="tight")
    assert body["state"] == "SUCCEEDED" or wrong(body, "PackageError", "user") is not None
    venue.recovered(body)


def test_bytes_that_are_not_their_digests_are_refused_at_the_door(venue: Venue) -> None:
    wanted = digest_of(b"what was promised")
    details = wrong(venue.refused("PUT", f"/v1/blobs/{wanted}", b"something else"), "PackageError", "user")
    assert details["found"] == digest_of(b"something else")
    spec = {"entrypoint": {"argv": ["/bin/true"]}, "package": wanted}
    assert wrong(venue.refused("POST", "/v1/jobs", spec), "BadRequest", "user")["missing"] == [wanted]


def test_a_package_that_went_bad_in_the_store_is_not_the_users_fault(venue: Venue) -> None:
    package = archive(("main.py", b"print('good')"))
    digest = venue.store(package)
    [file] = [f for f in (venue.broker.home / "blobs").rglob("*") if f.is_file() and f.read_bytes() == package]
    file.chmod(0o600)
    file.write_bytes(package.replace(b"main.py", b"evil.py"))
    body = venue.command("/bin/true", package=digest, sku="hint")
    assert digest in str(wrong(body, "StoreUnavailable", "infra", retryable=True))
    venue.recovered(body)


# -- requirements -----------------------------------------------------------------------------------------------------


def needs(venue: Venue, text: str, code: str, **fields: Any) -> Any:
    return venue.python(code, sku="wheels", requirements={"text": text}, **fields)


def test_requirements_from_the_pools_wheelhouse_are_there(venue: Venue) -> None:
    body = needs(venue, "alpha", "import alpha; print(alpha.version)")
    assert (body["state"], venue.log(body)) == ("SUCCEEDED", "1\n"), body
    told = venue.broker.json("GET", f"/v1/jobs/{body['id']}/explain")["text"]
    assert "requirements sha256:" in told, told
    assert venue.recovered(body) == "verified"


def test_a_requirement_that_does_not_exist_is_told_with_the_installers_words(venue: Venue) -> None:
    body = needs(venue, "no-such-thing-anywhere==7", "print('ran')")
    details = wrong(body, "DependencyInstallError", "user")
    assert "no-such-thing-anywhere" in details["log"]
    assert venue.log(body) == ""
    assert venue.recovered(body) == "verified"


def test_a_requirement_that_does_not_build_is_told_with_the_builds_words(venue: Venue) -> None:
    body = needs(venue, "broken", "print('ran')")
    details = wrong(body, "DependencyInstallError", "user")
    assert "this build cannot work" in details["log"]
    assert venue.recovered(body) == "verified"


def which_colorsys() -> object:
    import colorsys

    return getattr(colorsys, "fake", False)


def pths_that_were_read() -> object:
    import sys

    return getattr(sys, "pathy", None)


def test_a_layer_that_shadows_a_preloaded_module_wins_and_only_in_its_own_job(venue: Venue) -> None:
    assert venue.value(venue.function(which_colorsys, sku="wheels")) is False
    body = venue.function(which_colorsys, sku="wheels", requirements={"text": "shadow"})
    assert venue.value(body) is True
    assert venue.recovered(body) == "verified"
    assert venue.value(venue.function(which_colorsys, sku="wheels")) is False


def test_a_layers_pth_is_read_and_only_in_its_own_job(venue: Venue) -> None:
    body = venue.function(pths_that_were_read, sku="wheels", requirements={"text": "pathy"})
    assert venue.value(body) == "its .pth was read"
    assert venue.recovered(body) == "verified"
    assert venue.value(venue.function(pths_that_were_read, sku="wheels")) is None


def test_nothing_of_a_refused_package_is_in_the_pods_cache(venue: Venue, tmp_path: Path) -> None:
    good, bad = archive(("main.py", b"")), archive(("main.py", b""), ("../main.py", b""))
    for _ in range(2):
        wrong(run_with(venue, bad), "PackageError", "user")
        assert run_with(venue, good)["state"] == "SUCCEEDED"
