"""A seccomp filter that blocks system calls in a candidate's process: files, network, other processes.

The filter is BPF bytecode, installed with prctl through ctypes. The candidate cannot remove it, nor can any library
that it loads or patches, because the Linux kernel enforces it. Linux on x86-64 and arm64; elsewhere `forbid_calls`
returns False.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER_MODE = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ALL_BITS, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # bit of the x32 ABI's call numbers, a second numbering on x86-64

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# call -> (number on x86-64, number on arm64); None where an architecture has no such call
_FILES = {
    "open": (2, None), "creat": (85, None), "openat": (257, 56), "openat2": (437, 437),
}  # fmt: skip
_NEVER = {
    # files
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "truncate": (76, 45),
    "mknod": (133, None), "mknodat": (259, 33), "utimensat": (280, 88), "chdir": (80, 49), "chroot": (161, 51),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "setxattr": (188, 5), "memfd_create": (319, 279),
    # network
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # other processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kill": (62, 129), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "setns": (308, 268), "unshare": (272, 97),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    # the kernel itself
    "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "reboot": (169, 142),
    "setrlimit": (160, 164), "setpriority": (141, 140),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_TGKILL, _PRLIMIT = (234, 131), (302, 261)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid_calls(*, allow_reading: bool) -> bool:
    """Install the filter for this process and all its later threads; return False where the system has no seccomp.

    `allow_reading` permits opening files, for GPUs, whose libraries load code when it is first used. Starting threads
    is permitted, starting processes is not.
    """
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _ARCHITECTURES or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    code = _filter_code(machine, own_pid=os.getpid(), allow_reading=allow_reading)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    return bool(libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0) == 0)


def _filter_code(machine: str, *, own_pid: int, allow_reading: bool) -> bytes:
    """Return the filter's BPF instructions of 8 bytes: code, jump if true, jump if false, value."""
    column = 0 if machine == "x86_64" else 1
    deny = _ERRNO | errno.EPERM
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, deny)]
    calls = {**_NEVER, **({} if allow_reading else _FILES)}
    for numbers in calls.values():
        if (number := numbers[column]) is not None:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, deny)]
    # Without clone3 the C library falls back to clone, whose flags a filter can read.
    lines += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ALL_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, deny),
    ]
    for numbers, allowed in ((_TGKILL, own_pid), (_PRLIMIT, 0)):
        lines += [
            (_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 0, 1, allowed),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, deny),
        ]
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
