"""Run one Python program under limits: the process that `evaluation.run_code` starts, never imported by it.

    python -I -B code_runner.py PROGRAM FD TOKEN '{"cpu_seconds": 5, "memory_bytes": …, "file_bytes": …}'

Writes TOKEN to the file descriptor FD if the program ran to its end, and UNLIMITED if this machine does not enforce the
limit on processes, in which case the program does not run. The kernel enforces time, memory, processes and the sizes of
files. What has no such limit is refused by an audit hook: to change or delete files outside the working directory, to
signal other processes, to connect. A hook guards against accidents; it is not a boundary against an attacker.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

UNLIMITED = b"unlimited"
NOBODY = 65534
_REFUSED = {
    *("os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.killpg"),
    *(
        "os.chmod",
        "os.chown",
        "os.link",
        "os.symlink",
        "os.remove",
        "os.rename",
        "os.rmdir",
        "os.mkdir",
        "os.truncate",
        "os.utime",
    ),
    *("socket.connect", "socket.bind", "socket.sendto", "subprocess.Popen", "signal.pthread_kill"),
}
_MOST_FILES = 16
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_KEEP_CAPABILITIES, _CAPABILITY_VERSION, _READ_ANY_FILE = 8, 0x20080522, 1 << 2  # of linux/prctl.h, capability.h


def leave_root() -> None:
    """Run on as the user nobody where this process is root's, whom a limit on processes does not bind.

    The right to read all files stays where root has it: Python may be installed below /root.
    """
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)  # of this process
    rights = (ctypes.c_uint32 * 6)(_READ_ANY_FILE, _READ_ANY_FILE, 0, 0, 0, 0)  # effective, permitted, inheritable
    libc.capset(header, rights)


def set_limits(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Limits that the program cannot raise; it may have no process or thread beside its own."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for limit, most in limits.items():
        resource.setrlimit(limit, (most, most))


def can_fork() -> bool:
    """Whether a second process can be started in spite of the limit."""
    try:
        child = os.fork()
    except OSError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


folder = Path.cwd()
opened = 0  # files that the program has opened to write


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: PermissionError for what no limit bounds."""
    global opened
    if event in _REFUSED:
        raise PermissionError(f"{event} is not allowed here")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        path = arguments[0]
        if not isinstance(path, int) and Path(os.fsdecode(path)).resolve().parent != folder:
            raise PermissionError(f"{os.fsdecode(path)} is outside the working directory")
        opened += 1
        if opened > _MOST_FILES:
            raise PermissionError(f"at most {_MOST_FILES} files may be written")


def run(source: str) -> None:
    """Run a program as the module `answer`, where dataclasses look up names, without this file's future features."""
    answer = sys.modules["answer"] = ModuleType("answer")
    exec(compile(source, "answer.py", "exec", dont_inherit=True), vars(answer))


if __name__ == "__main__":
    program, descriptor, token, limits = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode(), json.loads(sys.argv[4])
    source = Path(program).read_text(encoding="utf-8")  # before root is left
    sys.argv = ["answer.py"]
    write = os.write
    with suppress(OSError):  # root in a container may be an ordinary user outside, whom the limit binds: see can_fork
        leave_root()
    set_limits(**limits)
    if can_fork():
        write(descriptor, UNLIMITED)
        sys.exit(1)
    sys.addaudithook(refuse)
    run(source)
    write(descriptor, token)
