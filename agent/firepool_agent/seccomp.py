"""The default seccomp profile of attempts as a BPF program: what no reward, trainer or tool needs and an escape would.

A denied call answers EPERM, so programs that merely probe go on. `clone3` answers ENOSYS, since its flags lie in memory
where a filter cannot look; the C library then falls back to `clone`, whose flags it can. Traced calls stay allowed inside
an attempt's own PID namespace (debuggers work there) and are denied where no namespace keeps others out of reach.
"""

import errno
import functools
import platform
import struct
from typing import Final

_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_LOAD_WORD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_AT_LEAST: Final = 0x35
_JUMP_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
#: Offsets in struct seccomp_data.
_NUMBER, _ARCH, _ARG0_LOW = 0, 4, 16
#: CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_NEW_NAMESPACES: Final = 0x7E020000
#: Calls of the x32 ABI on x86_64 start here: another door to the same kernel.
_X32: Final = 0x40000000

#: name: (x86_64, aarch64); None = that machine does not have the call.
_DENIED: Final[dict[str, tuple[int | None, int]]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "syslog": (103, 116),
    "iopl": (172, -1),
    "ioperm": (173, -1),
}
_TRACING: Final[dict[str, tuple[int | None, int]]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_MACHINES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, k)


def _deny_if_equal(number: int, error: int) -> bytes:
    return _op(_JUMP_EQUAL, number, 0, 1) + _op(_RETURN, _ERRNO | error)


@functools.cache
def default_profile(*, deny_tracing: bool, machine: str | None = None) -> bytes | None:
    """The profile for this machine; None on one whose call numbers we do not have (then the level says so)."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    column, arch = known
    program = [
        _op(_LOAD_WORD, _ARCH),
        _op(_JUMP_EQUAL, arch, 1, 0),
        _op(_RETURN, _ERRNO | errno.EPERM),
        _op(_LOAD_WORD, _NUMBER),
    ]
    if column == 0:
        program += [_op(_JUMP_AT_LEAST, _X32, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    denied = {**_DENIED, **_TRACING} if deny_tracing else _DENIED
    for numbers in denied.values():
        number = numbers[column]
        if number is not None and number >= 0:
            program.append(_deny_if_equal(number, errno.EPERM))
    program += [
        _deny_if_equal(_CLONE3[column], errno.ENOSYS),
        _op(_JUMP_EQUAL, _CLONE[column], 0, 3),
        _op(_LOAD_WORD, _ARG0_LOW),
        _op(_JUMP_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _op(_RETURN, _ERRNO | errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
    return b"".join(program)
