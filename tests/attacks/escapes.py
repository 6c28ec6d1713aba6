"""Programs that try to have an effect outside: each prints OPEN where it had one."""

import random
from collections.abc import Iterator

FILES = {
    "read": "print(open({file!r}).read())",
    "read_passwords": "print(open('/etc/passwd').read())",
    "read_environment": "print(open(f'/proc/{{os.getppid()}}/environ').read())",
    "list": "print(os.listdir({folder!r}))",
    "list_root": "print(os.listdir('/'))",
    "shared_memory": "open('/dev/shm/{word}', 'w').close(); os.unlink('/dev/shm/{word}')",
    "folder_above": "os.mkdir('../{word}'); os.rmdir('../{word}')",
    "anonymous": "assert library.memfd_create(b'x', 0) >= 0",
    "reserve": "os.posix_fallocate(os.open('x', os.O_RDWR | os.O_CREAT), 0, 4096)",
    "python": "os.truncate(sys.executable, 0)",
    "overwrite": "open({file!r}, 'r+b').write(b'x')",
    "append": "open({file!r}, 'ab').write(b'x')",
    "create": "open({folder!r} + '/{word}', 'w').close()",
    "create_above": "open('../{word}', 'w').close(); os.unlink('../{word}')",
    "link": "os.symlink({file!r}, '{word}'); open('{word}').read()",
    "hard_link": "os.link({file!r}, '{word}')",
    "rename": "os.rename({file!r}, '{word}')",
    "truncate": "os.truncate({file!r}, 0)",
    "empty": "os.open({file!r}, os.O_RDONLY | os.O_TRUNC)",
    "delete": "os.unlink({file!r})",
}
ATTRIBUTES = {
    "mode": "os.chmod({file!r}, 0o777)",
    "flags": "f = open(os.__file__); fcntl.ioctl(f, 0x40086602, fcntl.ioctl(f, 0x80086601, bytes(8)))",
    "mode_above": "os.chmod('..', 0o777)",
    "project": "fcntl.ioctl(open(os.__file__), 0x401C5820, bytes(28))",
    "lock": "fcntl.flock(open(os.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB)",
}
NETWORK = {
    "tcp": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "internet": "socket.socket()",
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}', timeout=2)",
    "descriptors": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [1])",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "unix": "socket.socket(socket.AF_UNIX).connect({unix!r})",
    "datagrams": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', '\\0{word}')",
}
PROCESSES = {
    "fork": "os.fork() or os._exit(0)",
    "forks": "while True: os.fork()",
    "subprocess": "import subprocess; subprocess.Popen(['sleep', '100'], start_new_session=True)",
    "multiprocessing": "import multiprocessing; multiprocessing.Process(target=print).start()",
    "clone": "pid = library.syscall(56, 17, 0, 0, 0, 0); pid == 0 and os._exit(0); assert pid > 0",
    "execute": "os.execv(sys.executable, [sys.executable, '-c', 'print(\"OP\" + \"EN\")'])",
    "kill": "os.kill({victim}, {signal})",
    "kill_all": "os.kill(-1, 0)",
    "kill_init": "os.kill(1, 0)",
    "kill_parent": "os.kill(os.getppid(), 9)",
    "kill_thread": "assert library.syscall(234, {victim}, {victim}, {signal}) == 0",
    "trace": "assert library.ptrace(0x4206, {victim}, 0, 0) == 0",
    "read_memory": "assert library.syscall(310, {victim}, 0, 0, 0, 0, 0) == 0",
    "open_memory": "open('/proc/{victim}/mem', 'rb')",
    "priority": "os.setpriority(os.PRIO_PROCESS, {victim}, 19)",
    "segments": "library.shmctl(0, 0, None); assert ctypes.get_errno() != 1",
    "handle": "assert library.syscall(434, {victim}, 0) >= 0",
}
_OWNED = """
a, b = socket.socketpair()
{owner}
fcntl.ioctl(a, 0x5452, struct.pack('i', 1))
b.send(b'x')
"""
SIGNALS = {
    "fiosetown": _OWNED.replace("{owner}", "fcntl.ioctl(a, 0x8901, struct.pack('i', {victim}))"),
    "siocspgrp": _OWNED.replace("{owner}", "fcntl.ioctl(a, 0x8902, struct.pack('i', {victim}))"),
    "f_setown": _OWNED.replace("{owner}", "fcntl.fcntl(a, fcntl.F_SETOWN, {victim})"),
}
KERNEL = {
    "mount": "os.mkdir('m'); assert library.mount(b'none', b'm', b'tmpfs', 0, None) == 0",
    "namespace": "assert library.unshare(0x10000000) == 0",
    "user": "os.setuid(os.getuid() + {number})",
    "limits": "resource.prlimit({victim}, resource.RLIMIT_NOFILE, ({number}, {number}))",
    "own_limits": "resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    "parent_death": "assert library.prctl(1, 0) == 0",
    "affinity": "os.sched_setaffinity({victim}, {{0}})",
    "io_uring": "assert library.syscall(425, 8, bytes(120)) >= 0",
    "other_numbers": "assert library.syscall(0x40000000 + 39) > 0",
    "other_architecture": "m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('b814000000cd80c3'));"
    " assert ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))() > 0",
}
_KEEPS = """
kept = []
for _ in range(40):
    file = open('{word}', 'w+b', buffering=0)
    file.write(bytes({size}))
    os.unlink('{word}')
    {keep}
time.sleep(9)
"""
LIMITS = {
    "memory": "kept = [bytearray(10**7) for _ in range(10**4)]",
    "output": "for _ in range(10**6): print('{word}' * 1000)",
    "many_files": "for i in range(10**5): open(f'{word}{{i}}', 'w').close()",
    "large_files": "for i in range(10**3): open(f'{word}{{i}}', 'wb').write(bytes({size}))",
    "open_files": _KEEPS.replace("{keep}", "kept.append(file)"),
    "mapped_files": _KEEPS.replace("{keep}", "kept.append(mmap.mmap(file.fileno(), 4096)); file.close()"),
    "time": "time.sleep(60)",
    "processor": "while True: pass",
}

KINDS = {
    "files": FILES,
    "attributes": ATTRIBUTES,
    "network": NETWORK,
    "processes": PROCESSES,
    "signals": SIGNALS,
    "kernel": KERNEL,
    "limits": LIMITS,
}
_IMPORTS = (
    "import ctypes, fcntl, mmap, os, resource, socket, struct, sys, time\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
)


def programs(rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """Kind, name and text of each; `{file}`, `{folder}`, `{port}`, `{unix}` and `{victim}` are left to be filled in."""
    for kind, texts in KINDS.items():
        for name, text in texts.items():
            chosen = {
                "word": "".join(rng.choices("abcdefgh", k=8)),
                "signal": rng.choice([9, 15, 10, 2]),
                "number": rng.randint(3, 60_000),
                "size": rng.randint(400_000, 1_900_000),
            }
            for key, value in chosen.items():
                text = text.replace(f"{{{key}}}", str(value))
            yield kind, name, f"{_IMPORTS}{text}\nprint('OP' + 'EN')\n"
