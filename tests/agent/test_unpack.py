"""Packages: what is unpacked is exactly the archive, and whatever is not a plain tree of files writes nothing (audit S39)."""

import hashlib
import io
import os
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firepool_agent import unpack
from firepool_wire.errors import PackageError
from firepool_wire.nursery import PodConfig


def archive(*entries: tuple[str, bytes] | zipfile.ZipInfo, compress: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compress) as z:
        for entry in entries:
            if isinstance(entry, zipfile.ZipInfo):
                z.writestr(entry, b"target")
            else:
                z.writestr(*entry)
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def special(name: str, kind: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (kind | 0o777) << 16
    return info


@pytest.fixture
def unpacker(tmp_path: Path) -> unpack.Unpacker:
    return unpack.Unpacker(config(tmp_path))


def config(root: Path) -> PodConfig:
    for name in ("unpack", "caches", "state", "scratch"):
        (root / name).mkdir(exist_ok=True)
    return PodConfig(
        pod="p", sku="cpu", listen_fd=-1, socket="", ready_fd=-1, boot_id="b", isolation_wanted="process",
        isolation="process", agent_dir=str(root), state_dir=str(root / "state"), caches_dir=str(root / "caches"),
        unpack_dir=str(root / "unpack"), scratch_dir=str(root / "scratch"), work_dir="", home_dir="", tmp_dir="", python="/x",
    )  # fmt: skip


def put(root: Path, data: bytes) -> tuple[str, str]:
    path = root / "package.zip"
    path.write_bytes(data)
    return digest(data), str(path)


def everything_under(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.name != "package.zip")


def test_the_tree_is_the_archive(tmp_path: Path, unpacker: unpack.Unpacker) -> None:
    script = zipfile.ZipInfo("bin/run.sh")
    script.external_attr = (stat.S_IFREG | 0o750) << 16
    tree = Path(unpacker.tree(*put(tmp_path, archive(("pkg/__init__.py", b"x = 1\n"), ("empty/", b""), script))))
    assert (tree / "pkg/__init__.py").read_text() == "x = 1\n"
    assert (tree / "empty").is_dir()
    assert (tree / "bin/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tree / "pkg/__init__.py").stat().st_mode & 0o777 == 0o644


def test_a_second_hand_off_of_the_same_digest_does_not_read_the_archive(
    tmp_path: Path, unpacker: unpack.Unpacker
) -> None:
    name, path = put(tmp_path, archive(("a.py", b"1")))
    first = unpacker.tree(name, path)
    os.unlink(path)
    assert unpacker.tree(name, path) == first == unpacker.cached(name)


@pytest.mark.parametrize(
    "entry",
    [
        ("../escape.py", b"x"),
        ("a/../../escape.py", b"x"),
        ("/etc/escape.py", b"x"),
        ("a//b.py", b"x"),
        ("./a.py", b"x"),
        ("..\\escape.py", b"x"),
        ("a/" + "n" * 300, b"x"),
        special("link", stat.S_IFLNK),
        special("pipe", stat.S_IFIFO),
        special("disk", stat.S_IFBLK),
        special("tty", stat.S_IFCHR),
        special("sock", stat.S_IFSOCK),
    ],
    ids=lambda e: e.filename if isinstance(e, zipfile.ZipInfo) else e[0][:20],
)
def test_an_entry_that_is_not_a_file_inside_refuses_the_package(
    entry: tuple[str, bytes] | zipfile.ZipInfo, tmp_path: Path, unpacker: unpack.Unpacker
) -> None:
    before = everything_under(tmp_path)
    with pytest.raises(PackageError):
        unpacker.tree(*put(tmp_path, archive(("good.py", b"1"), entry)))
    assert everything_under(tmp_path) == before
    assert not (tmp_path.parent / "escape.py").exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("second", [("a", b"2"), ("a/b", b"2")], ids=["twice", "file and directory"])
def test_entries_that_contradict_each_other_refuse_the_package(
    second: tuple[str, bytes], tmp_path: Path, unpacker: unpack.Unpacker
) -> None:
    with pytest.raises(PackageError):
        unpacker.tree(*put(tmp_path, archive(("a", b"1"), second)))
    assert os.listdir(tmp_path / "unpack") == []


def test_bytes_that_are_not_the_digests_are_refused_by_both_names(tmp_path: Path, unpacker: unpack.Unpacker) -> None:
    name, path = put(tmp_path, archive(("a.py", b"1")))
    Path(path).write_bytes(archive(("a.py", b"2")))
    with pytest.raises(PackageError) as refused:
        unpacker.tree(name, path)
    assert refused.value.details["expected"] == name
    assert refused.value.details["found"] != name


def test_something_that_is_no_archive_is_a_package_error(tmp_path: Path, unpacker: unpack.Unpacker) -> None:
    for data in (b"", b"not a zip", archive(("a", b"1" * 1000))[:-40]):
        with pytest.raises(PackageError):
            unpacker.tree(*put(tmp_path, data))


def test_a_bomb_is_stopped_by_what_it_writes_and_not_by_what_it_declares(tmp_path: Path) -> None:
    data = archive(("zeros", b"\0" * 4_000_000))
    # The header claims 10 bytes; the local and the central record are changed alike.
    lie = data.replace(struct.pack("<I", 4_000_000), struct.pack("<I", 10))
    bomb = unpack.Unpacker(config(tmp_path), unpack.Limits(written_bytes=1_000_000))
    for each in (data, lie):
        with pytest.raises(PackageError) as refused:
            bomb.tree(*put(tmp_path, each))
        assert os.listdir(tmp_path / "unpack") == []
        if each is data:
            assert refused.value.details == {"limit_bytes": 1_000_000}


def test_an_archive_over_the_compressed_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    small = unpack.Unpacker(config(tmp_path), unpack.Limits(compressed_bytes=100))
    with pytest.raises(PackageError, match="limit is 100"):
        small.tree(*put(tmp_path, archive(("a", os.urandom(200)))))


def test_six_hundred_mebibytes_are_over_the_default_limit(tmp_path: Path, unpacker: unpack.Unpacker) -> None:
    path = tmp_path / "package.zip"
    with path.open("wb") as f:
        f.truncate(600 << 20)  # sparse: no bytes are written
    with pytest.raises(PackageError, match="536870912"):
        unpacker.tree("sha256:" + "0" * 64, str(path))


def test_an_archive_of_too_many_entries_is_refused(tmp_path: Path) -> None:
    few = unpack.Unpacker(config(tmp_path), unpack.Limits(entries=3))
    with pytest.raises(PackageError, match="4 entries"):
        few.tree(*put(tmp_path, archive(*((f"f{n}", b"") for n in range(4)))))


@pytest.mark.parametrize("name", ["md5:abc", "sha256:../../etc", "sha256:" + "A" * 64, ""])
def test_a_digest_never_becomes_a_path_of_its_own(name: str, tmp_path: Path, unpacker: unpack.Unpacker) -> None:
    with pytest.raises(PackageError):
        unpacker.tree(name, put(tmp_path, archive(("a", b"1")))[1])


names = st.text(st.sampled_from("ab./\\ -"), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(entries=st.lists(st.tuples(names, st.binary(max_size=40)), max_size=5))
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_set_of_names_ever_writes_outside(
    entries: list[tuple[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("fuzz")
    target = root / "a" / "b" / "target"
    target.mkdir(parents=True)
    package = root / "package.zip"
    package.write_bytes(archive(*entries))
    try:
        unpack.extract(str(package), str(target), unpack.Limits())
    except PackageError:
        pass
    outside = [
        p for p in root.rglob("*") if target not in p.parents and p not in (target, package, root / "a", root / "a/b")
    ]
    assert outside == []
