"""System calls that programs may use, with their numbers on x86_64 and aarch64. None marks a missing call."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Supported machine architectures, each with the number that identifies it in a seccomp filter."""

ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # files
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "preadv": (295, 69), "pwritev": (296, 70), "open": (2, None), "openat": (257, 56), "creat": (85, None), "close": (3, 57),
    "close_range": (436, 436), "lseek": (8, 62), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "fcntl": (72, 25),
    "ioctl": (16, 29), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "truncate": (76, 45),
    "fallocate": (285, 47), "fadvise64": (221, 223), "sendfile": (40, 71), "copy_file_range": (326, 285),
    # folders and names
    "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43),
    "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents": (78, None),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "readlink": (89, None), "readlinkat": (267, 78), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "umask": (95, 166), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88),
    "futimesat": (261, None), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233), "msync": (26, 227),
    "mincore": (27, 232), "brk": (12, 214), "membarrier": (324, 283),
    # processes and threads
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "exit": (60, 93), "exit_group": (231, 94),
    "wait4": (61, 260), "waitid": (247, 95), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
    "setsid": (112, 157), "setpgid": (109, 154), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "futex": (202, 98),
    "rseq": (334, 293), "arch_prctl": (158, None), "prctl": (157, 167), "prlimit64": (302, 261), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getrusage": (98, 165), "times": (100, 153), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getscheduler": (145, 120), "sched_getparam": (143, 121),
    "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126), "getpriority": (140, 141), "getcpu": (309, 168),
    "uname": (63, 160), "sysinfo": (99, 179),
    # signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigqueueinfo": (129, 138), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pause": (34, None), "alarm": (37, None),
    "getitimer": (36, 102), "setitimer": (38, 103), "signalfd": (282, None), "signalfd4": (289, 74),
    "restart_syscall": (219, 128), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    # time
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "timer_create": (222, 107), "timer_settime": (223, 110),
    "timer_gettime": (224, 108), "timer_getoverrun": (225, 109), "timer_delete": (226, 111), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    # waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "eventfd": (284, None), "eventfd2": (290, 19), "pipe": (22, None), "pipe2": (293, 59),
    # pairs of sockets and nothing that could be connected to: each holds 208 KiB at most, and is counted. No sendmsg: an open
    # file on its way through a socket can outlive all processes. No setsockopt: it raises that size, and attaches filters.
    "socketpair": (53, 199), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209), "shutdown": (48, 210),
    "sendto": (44, 206), "recvfrom": (45, 207), "recvmsg": (47, 212), "recvmmsg": (299, 243),
    # chance
    "getrandom": (318, 278),
}  # fmt: skip


def allowed_numbers(machine: str) -> dict[str, int]:
    """Names and numbers of all system calls allowed on a machine. Raises ValueError for an unknown architecture."""
    if machine not in ARCHITECTURES:
        raise ValueError(f"sandbox: there is no list of system calls for {machine}, only for {', '.join(ARCHITECTURES)}.")
    column = list(ARCHITECTURES).index(machine)
    return {name: number for name, numbers in ALLOWED.items() if (number := numbers[column]) is not None}
