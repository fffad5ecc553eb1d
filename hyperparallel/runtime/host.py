"""What this process asks of its operating system: cores, process groups, end of parents, ports.

Every call that differs between systems stands here. Linux has all of them; elsewhere the kernel
cannot be told to kill a child with its parent, and the watching thread alone does it, within a
second or two.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time

from hyperparallel.errors import UserError

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_HELD_BYTES = 1 << 30
_MMAP_BYTES = (1 << 28, 32 << 20)
"""The largest block kept, and the largest that older glibc takes for it."""

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The network interface that never leaves this machine."""


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> bool:
    """Let the allocator keep what is freed for what comes next; returns whether it will.

    glibc hands large blocks back to the system when they are freed, and the next step's tensors page them
    in again, one fault per 4 KB. A training process needs the same memory in every step. For the whole
    process, and for good; not done where the environment tunes the allocator itself (`MALLOC_...`,
    `GLIBC_TUNABLES`), nor with another C library.
    """
    tuned = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if tuned or sys.platform != "linux":
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  raises where it is another library
        trims = library.mallopt(_M_TRIM_THRESHOLD, _HELD_BYTES)
        return bool(trims) and any(library.mallopt(_M_MMAP_THRESHOLD, size) for size in _MMAP_BYTES)
    except (OSError, AttributeError):
        return False


def die_with(parent: int, watched: int) -> None:
    """Kill this process as soon as its parent dies, or the process `watched`; returns at once.

    The kernel is asked first (it needs no running thread here), then a thread watches `watched`,
    which is another process than the parent when a fork server stands between.
    """
    if sys.platform == "linux":
        # The kernel's parent is the thread that forked: `launch` stays in it until all ranks are gone.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # died before we asked
    threading.Thread(target=_follow, args=(watched,), daemon=True, name="parent-watch").start()


def _follow(pid: int) -> None:
    try:
        if hasattr(os, "pidfd_open"):
            select.select([os.pidfd_open(pid)], [], [])
        else:
            while True:
                os.kill(pid, 0)
                time.sleep(1.0)
    except OSError:
        pass  # gone already, or not ours to watch: then it is not our launcher any more
    os.kill(os.getpid(), signal.SIGKILL)


def lead_process_group() -> None:
    """Make this process the leader of its own group, so that its children can be ended with it."""
    os.setpgid(0, 0)


def signal_group(pid: int, number: int, has_ended: bool = False) -> None:
    """Send a signal to process `pid` and every process of the group that it leads, or led."""
    # Of one that has ended only the group: its number may be another process's by now, but not as long as
    # its group has a member.
    for send in (os.killpg,) if has_ended else (os.killpg, os.kill):
        try:
            send(pid, number)
            return
        except (ProcessLookupError, PermissionError):
            continue  # the group does not exist (yet, or any more)


def listen_on_loopback(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1:port; `UserError` when the port is taken."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        server.close()
        raise UserError(
            "port", port, f"a free port ({error})", instead="no port: a free one is chosen then"
        ) from error
    server.listen(1024)
    return server
