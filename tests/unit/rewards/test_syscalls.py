import re
from pathlib import Path

import pytest

from hybridflow.rewards.sandbox.syscalls import denied_numbers, filter_of, special_numbers
from tests.oracles.syscall_filter import answer

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", ARCH)
def test_each_call_is_answered_as_meant(machine):
    instructions = filter_of(machine)
    assert instructions is not None
    special = special_numbers(machine)

    def found(number, *args, arch=ARCH[machine]):
        return answer(instructions, arch=arch, number=number, args=args, pid=77)

    assert {found(number) for number in denied_numbers(machine).values()} == {EPERM}
    assert found(special["clone3"]) == ENOSYS
    assert found(special["clone"], 0x3D0F00) == ALLOW  # a thread, as the C library makes one
    assert found(special["clone"], 17) == EPERM  # fork
    assert found(special["clone"], 0x10000000 | 17) == EPERM  # in a new user namespace
    for name in ("kill", "tgkill"):
        assert found(special[name], 77, 9) == ALLOW
        assert {found(special[name], other, 9) for other in (1, 0, -1, -77, 78)} == {EPERM}
    assert found(special["prlimit64"], 0, 3, 0, 5) == ALLOW
    assert {found(special["prlimit64"], 0, 3, pointer, 0) for pointer in (8, 1 << 32)} == {EPERM}
    assert {found(special["clone"], flags) for flags in (0x3D0F00 & ~0x400, 0x10000)} == {EPERM}  # files of its own
    owners, leases, pipe_size = (8, 10, 15), (1024, 1026), (1031,)
    assert {found(special["fcntl"], 3, command) for command in (*owners, *leases, *pipe_size, 2**31)} == {EPERM}
    assert {found(special["fcntl"], 3, command) for command in (0, 1, 2, 3, 4, 6, 1030)} == {ALLOW}
    owners = (0x8901, 0x8902, 0x5452, 0x5410)  # FIOSETOWN, SIOCSPGRP, FIOASYNC, TIOCSPGRP
    attributes = (0x40086602, 0x401C5820, 0x40049409, 0x5412)  # SETFLAGS, FSSETXATTR, FICLONE, TIOCSTI
    assert {found(special["ioctl"], 3, request) for request in (*owners, *attributes, 0)} == {EPERM}
    assert {found(special["ioctl"], 3, request) for request in (0x5401, 0x541B, 0x5421, 0x5451)} == {ALLOW}
    assert found(special["ioctl"], 3, 2**32 + 0x8901) == EPERM  # the kernel looks at 32 bits too
    assert found(special["close_range"], 3, 9, 2) == EPERM and found(special["close_range"], 3, 9, 4) == ALLOW
    assert found(special["socketpair"], 1, 1) == found(special["socketpair"], 1, 1 | 0x80800) == ALLOW  # streams
    assert {found(special["socketpair"], *kind) for kind in ((1, 2), (1, 3), (1, 5), (2, 1), (30, 1))} == {EPERM}
    for name, flags in (("open", 1), ("openat", 2)):
        if name in special:
            assert found(special[name], *[0] * flags, 0o1000) == EPERM  # emptied by who may read it
            assert {found(special[name], *[0] * flags, bits) for bits in (0, 1, 0o1101, 0o2000000)} == {ALLOW}
    assert {found(number) for number in (452, 470, 1000)} == {ENOSYS}
    assert found(63, arch=0x40000003) == KILL
    if machine == "x86_64":
        assert found(0) == found(1) == found(231) == ALLOW  # read, write, exit_group
        assert found(0x40000000 + 57) == KILL  # the other numbering


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(machine):
    text = HEADERS[machine].read_text() if HEADERS[machine].is_file() else ""
    listed = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    for name, number in (denied_numbers(machine) | special_numbers(machine)).items():
        assert listed.get(name, number) == number, name


def test_other_machines_have_no_filter():
    assert filter_of("riscv64") is None
