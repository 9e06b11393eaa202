"""The kernel calls that Python 3.11 has no door to, as functions that raise `OSError` with the call's name.

Only thin doors live here; what they are good for is the business of the rooms that call them. Every room of the agent
may call this one; it calls none. On a platform without Linux's calls every function raises `OSError(ENOSYS)`.
"""

import ctypes
import errno
import os
import platform
import sys
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWCGROUP: Final = 0x02000000
CLONE_NEWUTS: Final = 0x04000000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_RDONLY: Final = 0x1
MS_NOSUID: Final = 0x2
MS_NODEV: Final = 0x4
MS_NOEXEC: Final = 0x8
MS_REMOUNT: Final = 0x20
MS_NOATIME: Final = 0x400
MS_NODIRATIME: Final = 0x800
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x40000
MS_SLAVE: Final = 0x80000
MS_RELATIME: Final = 0x200000
MNT_DETACH: Final = 2

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NAME: Final = 15
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
#: Capabilities stay across changes of uid (the janitor switches uids many times).
SECBIT_NO_SETUID_FIXUP: Final = 1 << 2

CAP_KILL: Final = 5

_KEYCTL_JOIN_SESSION_KEYRING: Final = 1
_IPC_RMID: Final = 0

#: Numbers of calls without a libc function, by machine.
_NUMBERS: Final = {
    "x86_64": {"pivot_root": 155, "keyctl": 250, "capset": 126},
    "aarch64": {"pivot_root": 41, "keyctl": 219, "capset": 91},
}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _call(name: str, *args: object) -> int:
    function = getattr(_libc, name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{name}: not on this platform")
    return _check(function(*args), name)


def _raw(name: str, *args: object) -> int:
    number = _NUMBERS.get(platform.machine(), {}).get(name)
    if number is None or sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{name}: not on this platform")
    return _check(_libc.syscall(ctypes.c_long(number), *args), name)


def unshare(flags: int) -> None:
    """Leave the namespaces named by `CLONE_NEW*` flags for new ones. Raises: OSError."""
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, kind: int) -> None:
    """Join the namespace behind a /proc/<pid>/ns descriptor. Raises: OSError."""
    _call("setns", ctypes.c_int(fd), ctypes.c_int(kind))


def mount(source: str | None, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """mount(2). Raises: OSError that names the target."""
    raw = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    if _libc.mount(raw[0], raw[1], raw[2], ctypes.c_ulong(flags), raw[3]) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {kind or 'bind'} {source} on {target}: {os.strerror(code)}")


def bind(source: str, target: str, *, read_only: bool = False, recursive: bool = False) -> None:
    """Bind mount; `read_only` keeps whatever flags the source's mount has (a user namespace may not clear them).

    Raises: OSError.
    """
    mount(source, target, None, MS_BIND | (MS_REC if recursive else 0))
    if read_only:
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | _locked_flags(target))


def _locked_flags(path: str) -> int:
    seen = os.statvfs(path).f_flag
    pairs = (
        (os.ST_NOSUID, MS_NOSUID),
        (os.ST_NODEV, MS_NODEV),
        (os.ST_NOEXEC, MS_NOEXEC),
        (os.ST_NOATIME, MS_NOATIME),
        (os.ST_NODIRATIME, MS_NODIRATIME),
        (os.ST_RELATIME, MS_RELATIME),
    )
    return sum(flag for bit, flag in pairs if seen & bit)


def umount(target: str, flags: int = MNT_DETACH) -> None:
    """umount2(2), lazy by default. Raises: OSError."""
    _call("umount2", os.fsencode(target), ctypes.c_int(flags))


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2). Raises: OSError."""
    _raw("pivot_root", os.fsencode(new_root), os.fsencode(put_old))


def _prctl(option: int, what: str, *args: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    function = getattr(_libc, "prctl", None)
    if function is None:
        raise OSError(errno.ENOSYS, f"{what}: not on this platform")
    _check(function(ctypes.c_int(option), *padded), what)


def die_with_parent(signal_number: int) -> None:
    """Be sent this signal when the parent process is gone. Raises: OSError."""
    _prctl(_PR_SET_PDEATHSIG, "PR_SET_PDEATHSIG", signal_number)


def set_dumpable(on: bool) -> None:
    """Whether others of the same uid may trace this process and read its /proc entries. Raises: OSError."""
    _prctl(_PR_SET_DUMPABLE, "PR_SET_DUMPABLE", int(on))


def become_subreaper() -> None:
    """Orphans below this process become its children, so that it can reap them. Raises: OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, "PR_SET_CHILD_SUBREAPER", 1)


def no_new_privileges() -> None:
    """No exec below this process ever gains privileges again. Raises: OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, "PR_SET_NO_NEW_PRIVS", 1)


def set_securebits(bits: int) -> None:
    """Set the thread's securebits. Raises: OSError."""
    _prctl(_PR_SET_SECUREBITS, "PR_SET_SECUREBITS", bits)


def set_name(name: str) -> None:
    """The process's name in ps and /proc/<pid>/comm (15 bytes). Raises: OSError."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(ctypes.c_int(_PR_SET_NAME), buffer, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def set_seccomp_filter(program: bytes) -> None:
    """Install a BPF program (`struct sock_filter` array, 8 bytes an instruction) over this process. Raises: OSError."""

    class _Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    buffer = ctypes.create_string_buffer(program, len(program))
    wrapped = _Program(len(program) // 8, ctypes.addressof(buffer))
    filter_mode = 2
    result = _libc.prctl(
        ctypes.c_int(_PR_SET_SECCOMP),
        ctypes.c_ulong(filter_mode),
        ctypes.byref(wrapped),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )
    _check(result, "PR_SET_SECCOMP")


def drop_bounding_set() -> None:
    """Take every capability out of the bounding set (as far as the kernel knows them)."""
    for capability in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, "PR_CAPBSET_DROP", capability)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return
            raise


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def set_capabilities(mask: int) -> None:
    """Make `mask` (bit per capability) the effective and permitted set; nothing is inheritable. Raises: OSError."""
    version_3 = 0x20080522
    header = _CapHeader(version_3, 0)
    data = (_CapData * 2)()
    for word in range(2):
        bits = (mask >> (32 * word)) & 0xFFFFFFFF
        data[word] = _CapData(bits, bits, 0)
    _raw("capset", ctypes.byref(header), ctypes.byref(data))


def new_session_keyring() -> None:
    """Join a fresh, empty session keyring. Raises: OSError (ENOSYS, EPERM where keyrings are not there)."""
    _raw(
        "keyctl",
        ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING),
        None,
        ctypes.c_long(0),
        ctypes.c_long(0),
        ctypes.c_long(0),
    )


def remove_ipc(kind: str, identifier: int) -> None:
    """Remove a System V object: kind `shm`, `sem` or `msg`. Raises: OSError."""
    if kind == "sem":
        _call("semctl", ctypes.c_int(identifier), ctypes.c_int(0), ctypes.c_int(_IPC_RMID))
    else:
        _call(f"{kind}ctl", ctypes.c_int(identifier), ctypes.c_int(_IPC_RMID), None)
