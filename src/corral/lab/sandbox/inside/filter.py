"""The seccomp filter, under which only listed system calls succeed.

A filter is a small BPF program. It sees the call's number, the architecture and the
arguments' values, not what pointers point to. Calls that are not listed fail with ENOSYS, as on a kernel without them, so
that libraries fall back; a few are let through for some arguments only and fail with EPERM otherwise.
"""

import ctypes
import errno
import struct
from collections.abc import Sequence

from corral.lab.sandbox.inside import kernel
from corral.lab.sandbox.inside.syscalls import ARCHITECTURES, allowed_numbers

_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
"""Outcomes of a system call: allow the call, kill the process, or refuse the call with an error number."""

_LOAD, _JUMP, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_FARTHEST = 255
"""Largest number of BPF instructions that a conditional jump can skip."""

_NAMESPACES, _SIBLING = 0x7E020000, 0x00008000
"""Refused flags of `clone`: new namespaces, and a child of the caller's parent.

The memory of such a child would not be counted for this process.
"""
_SHARED, _ANONYMOUS, _HUGE = 0x01, 0x20, 0x40000
"""Flags of `mmap` for memory that is not counted for a process: shared anonymous memory, and huge pages."""

_UNIX = 1
_SEND_FLAGS = (0, 0x40, 0x4000, 0x4040)
"""Allowed flags of sendto: no waiting, no signal. Out-of-band data are refused: the kernel had bugs there."""
_FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Allowed commands of fcntl: duplicate, close on exec, flags, range locks, pipe size.

Excluded are leases, which make any process that opens the file wait, even the trainer, and larger pipes.
"""
_MEMORY_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 102, 103)
"""Allowed advice of madvise. Swapping out is not allowed: swapped pages would not be counted."""
_TERMINAL_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Allowed requests of ioctl: a terminal's settings, group and size, bytes to read, non-blocking, close on exec."""
_NAME_REQUESTS = (1, 2, 3, 15, 16)
"""Requests of prctl that the sandbox allows: set the signal sent when the parent ends, dumpability, or a thread's name."""

ALLOWED_VALUES: dict[str, tuple[int, Sequence[int]]] = {
    "socketpair": (0, (_UNIX,)),
    "sendto": (3, _SEND_FLAGS),
    "fcntl": (1, _FILE_COMMANDS),
    "madvise": (2, _MEMORY_ADVICE),
    "ioctl": (1, _TERMINAL_REQUESTS),
    "prctl": (0, _NAME_REQUESTS),
    "prlimit64": (0, (0,)),  # one's own limits, not those of the process that watches
}
"""System calls allowed for some values of one argument only: name → (the argument's index, allowed values)."""

REFUSED_FLAGS: dict[str, tuple[int, Sequence[Sequence[int]]]] = {
    "clone": (0, [[_NAMESPACES | _SIBLING]]),
    "mmap": (3, [[_HUGE], [_SHARED, _ANONYMOUS]]),
}
"""System calls refused for some flags: name → (the argument's index, lists of masks).

A list matches if the argument has a bit of each mask.
"""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode a BPF instruction. Jumps count the instructions that they skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def build(machine: str) -> bytes:
    """Build the filter's BPF program for one machine architecture."""
    bodies = {number: _body(name) for name, number in allowed_numbers(machine).items()}
    missing = [_instruction(_RETURN, _REFUSE | errno.ENOSYS)]
    starts: list[tuple[int, list[bytes]]] = []  # numbers from here on, up to the next start, have this body
    for number in range(max(bodies) + 2):  # beyond the last one all are missing, those of x32 among them
        body = bodies.get(number, missing)
        if not starts or starts[-1][1] != body:
            starts.append((number, body))
    head = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER),
    ]
    return b"".join([*head, *_search(starts)])


def _body(name: str) -> list[bytes]:
    """Build the BPF instructions that allow or refuse a single system call."""
    allow, refuse = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _REFUSE | errno.EPERM)
    if name in REFUSED_FLAGS:
        index, lists = REFUSED_FLAGS[name]
        tests = [[_instruction(_ANY_BIT, mask, 0, len(masks) - at) for at, mask in enumerate(masks)] for masks in lists]
        body, last = [line for test in tests for line in (*test, refuse)], allow
    elif name in ALLOWED_VALUES:
        index, values = ALLOWED_VALUES[name]
        body, last = [line for value in values for line in (_instruction(_EQUAL, value, 0, 1), allow)], refuse
    else:
        return [allow]
    return [_instruction(_LOAD, _ARGUMENTS + 8 * index), *body, last]  # the low half: the kernel reads no more of these


def _search(starts: list[tuple[int, list[bytes]]]) -> list[bytes]:
    """Build a binary search over system-call numbers, since a list would take half a millisecond to install."""
    if len(starts) == 1:
        return starts[0][1]
    middle = len(starts) // 2
    low, high = _search(starts[:middle]), _search(starts[middle:])
    if len(low) <= _FARTHEST:
        return [_instruction(_AT_LEAST, starts[middle][0], len(low), 0), *low, *high]
    return [_instruction(_AT_LEAST, starts[middle][0], 0, 1), _instruction(_JUMP, len(low)), *low, *high]


class Filter:
    """A seccomp filter that can be installed after a call of `forbid_new_privileges`."""

    def __init__(self, program: bytes) -> None:
        self._program = ctypes.create_string_buffer(program, len(program))  # the header points to it
        header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(self._program))
        self._header = ctypes.create_string_buffer(header, len(header))
        self._address = ctypes.addressof(self._header)

    def install(self) -> None:
        """Install the filter of system calls on this process and its future children. It cannot be removed."""
        kernel.prctl(22, 2, self._address)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
