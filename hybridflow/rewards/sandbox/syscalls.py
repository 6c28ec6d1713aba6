"""The seccomp filter of an untrusted program: the system calls that it may not make.

With Landlock, which restricts files, this leaves a program its own memory, threads, clock and directory: no other
processes, no network, no kernel settings. A filter is a list of classic BPF instructions
`[code, jump if true, jump if false, k]`; a k of None is the program's own process id.
"""

import platform
import sys
from collections.abc import Sequence

_NUMBERS = """
    fork:57:- vfork:58:- execve:59:221 execveat:322:281 unshare:272:97 setns:308:268 socket:41:198 connect:42:203
    bind:49:200 listen:50:201 accept:43:202 accept4:288:242 ptrace:101:117 process_vm_readv:310:270
    process_vm_writev:311:271 process_madvise:440:440 process_mrelease:448:448 pidfd_open:434:434
    pidfd_getfd:438:438 pidfd_send_signal:424:424 kcmp:312:272 tkill:200:130 rt_sigqueueinfo:129:138
    rt_tgsigqueueinfo:297:240 prctl:157:167 setrlimit:160:164 capset:126:91 personality:135:92 setpriority:141:140
    sched_setparam:142:118 sched_setscheduler:144:119 sched_setaffinity:203:122 sched_setattr:314:274
    ioprio_set:251:30 migrate_pages:256:238 move_pages:279:239 mount:165:40 umount2:166:39 pivot_root:155:41
    chroot:161:51 move_mount:429:429 open_tree:428:428 fsopen:430:430 fsconfig:431:431 fsmount:432:432
    fspick:433:433 mount_setattr:442:442 swapon:167:224 swapoff:168:225 quotactl:179:60 quotactl_fd:443:443
    acct:163:89 reboot:169:142 sethostname:170:161 setdomainname:171:162 init_module:175:105 finit_module:313:273
    delete_module:176:106 kexec_load:246:104 kexec_file_load:320:294 syslog:103:116 vhangup:153:58 iopl:172:-
    ioperm:173:- settimeofday:164:170 clock_settime:227:112 clock_adjtime:305:266 adjtimex:159:171 bpf:321:280
    perf_event_open:298:241 userfaultfd:323:282 io_uring_setup:425:425 io_uring_enter:426:426
    io_uring_register:427:427 keyctl:250:219 add_key:248:217 request_key:249:218 memfd_create:319:279
    memfd_secret:447:447 shmget:29:194 shmat:30:196 shmctl:31:195 msgget:68:186 msgsnd:69:189 msgrcv:70:188
    msgctl:71:187 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192 mq_open:240:180 mq_unlink:241:181
    truncate:76:45 openat2:437:437 chmod:90:- fchmod:91:52
    fchmodat:268:53 chown:92:- lchown:94:- fchown:93:55 fchownat:260:54 utime:132:- utimes:235:- futimesat:261:-
    utimensat:280:88 mknod:133:- mknodat:259:33 setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14
    lremovexattr:198:15 fremovexattr:199:16 name_to_handle_at:303:264 open_by_handle_at:304:265
    fanotify_init:300:262 inotify_init:253:- inotify_init1:294:26
    sendmsg:46:211 sendmmsg:307:269 fallocate:285:47 flock:73:32 sync:162:81 syncfs:306:267
"""
"""Calls that fail with EPERM, each with its numbers on x86_64 and on aarch64 (`-`: not there)."""

_WITH_CONDITIONS = """
    clone:56:220 clone3:435:435 kill:62:129 tgkill:234:131 prlimit64:302:261 fcntl:72:25
    socketpair:53:199 open:2:- openat:257:56 ioctl:16:29 close_range:436:436
"""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FIRST_TOO_NEW = 452
_X32 = 0x40000000

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_CLONE_THREAD, _CLONE_FILES, _CLOSE_RANGE_UNSHARE = 0x10000, 0x400, 2
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Copies, flags and locks of a descriptor. Not allowed: the recipient of its signals (F_SETOWN, F_SETOWN_EX, F_SETSIG),
leases and notifications (F_SETLEASE, F_NOTIFY), pipe sizes, seals and hints."""
_IOCTL_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2 and TIOCGWINSZ (is it a terminal, and of what size), FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Not
allowed: the recipient of a file's signals (FIOSETOWN, SIOCSPGRP, TIOCSPGRP, FIOASYNC), file attributes
(FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR), clones of files, and requests of specific devices or file systems."""
_AF_UNIX, _TYPES, _SOCK_STREAM = 1, 0xF, 1
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000

Instruction = Sequence[int | None]


def filter_of(machine: str = platform.machine()) -> list[Instruction] | None:
    """The filter for a machine; None if it is not supported."""
    if machine not in _ARCHITECTURES or not sys.platform.startswith("linux"):
        return None
    numbers = denied_numbers(machine)
    special = special_numbers(machine)
    instructions: list[Instruction] = [
        [_LOAD, 0, 0, _ARCHITECTURE],
        [_EQUAL, 1, 0, _ARCHITECTURES[machine]],
        [_RETURN, 0, 0, _KILL],
        [_LOAD, 0, 0, _NUMBER],
        *_returning([_AT_LEAST, 0, 0, _X32], _KILL),
        *_returning([_AT_LEAST, 0, 0, _FIRST_TOO_NEW], _ENOSYS),
        *_returning([_EQUAL, 0, 0, special["clone3"]], _ENOSYS),  # the C library then uses clone
    ]
    for number in numbers.values():
        instructions += _returning([_EQUAL, 0, 0, number], _EPERM)
    # Allowed: threads that share the table of files, but no processes; signals to itself; reading limits.
    threads: list[Instruction] = [[_ANY_BIT, 0, 2, _CLONE_THREAD], [_ANY_BIT, 0, 1, _CLONE_FILES]]
    instructions += _conditional(special["clone"], 0, threads)
    instructions += _conditional(special["close_range"], 2, [[_ANY_BIT, 1, 0, _CLOSE_RANGE_UNSHARE]])
    for name in ("kill", "tgkill"):
        instructions += _conditional(special[name], 0, [[_EQUAL, 0, 1, None]])
    low, high = [_EQUAL, 0, 3, 0], [_EQUAL, 0, 1, 0]
    instructions += _conditional(special["prlimit64"], 2, [low, [_LOAD, 0, 0, _ARGUMENTS + 2 * 8 + 4], high])
    instructions += _only(special["fcntl"], 1, _FCNTL_COMMANDS) + _only(special["ioctl"], 1, _IOCTL_REQUESTS)
    # Only stream sockets: a pair of datagram sockets could also send to any other socket.
    kind: list[Instruction] = [[_LOAD, 0, 0, _ARGUMENTS + 8], [_AND, 0, 0, _TYPES], [_EQUAL, 0, 1, _SOCK_STREAM]]
    instructions += _conditional(special["socketpair"], 0, [[_EQUAL, 0, len(kind) + 1, _AF_UNIX], *kind])
    # Before Linux 6.2, Landlock lets a program truncate any file that it may read.
    emptied: list[Instruction] = [[_AND, 0, 0, _O_ACCMODE | _O_TRUNC], [_EQUAL, 1, 0, _O_TRUNC]]
    for name, flags in (("open", 1), ("openat", 2)):
        instructions += _conditional(special[name], flags, emptied) if name in special else []
    return [*instructions, [_RETURN, 0, 0, _ALLOW]]


def denied_numbers(machine: str) -> dict[str, int]:
    """The calls that always fail, by name."""
    return _parsed(_NUMBERS, machine)


def special_numbers(machine: str) -> dict[str, int]:
    """The calls that depend on their arguments, by name."""
    return _parsed(_WITH_CONDITIONS, machine)


def _parsed(table: str, machine: str) -> dict[str, int]:
    column = list(_ARCHITECTURES).index(machine) + 1
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _returning(test: Instruction, answer: int) -> list[Instruction]:
    """Returns this action if the test holds, else continues."""
    code, _, _, k = test
    return [[code, 0, 1, k], [_RETURN, 0, 0, answer]]


def _conditional(
    number: int, argument: int, tests: Sequence[Instruction], *, passed: int = _ALLOW, jumped: int = _EPERM
) -> list[Instruction]:
    """For this call: returns one action if the tests of the argument fall through, the other if they jump."""
    load: Instruction = [_LOAD, 0, 0, _ARGUMENTS + argument * 8]
    body: list[Instruction] = [load, *tests, [_RETURN, 0, 0, passed], [_RETURN, 0, 0, jumped]]
    return [[_EQUAL, 0, len(body), number], *body]


def _only(number: int, argument: int, values: Sequence[int]) -> list[Instruction]:
    """For this call: allowed if the argument is one of the values, else EPERM."""
    tests: list[Instruction] = [[_EQUAL, len(values) - at, 0, value] for at, value in enumerate(values)]
    return _conditional(number, argument, tests, passed=_EPERM, jumped=_ALLOW)
