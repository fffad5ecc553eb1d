"""The private cache folder of a user, where files appear whole or not at all.

A file is written under a temporary name in the same folder, flushed to disk and renamed, so a
reader never sees half of it and a killed writer leaves nothing a reader would take. Folders are
0700 and files 0600: text that a user trains on may be confidential. `lock` lets the first of
several processes build an entry while the others wait; where the system has no `fcntl` every
process builds its own copy, and the rename still keeps each whole.

Leaves out: eviction. Entries are named by a hash of what they were made from, and may be deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from hyperparallel.runtime.checkpoint.folder import sync

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/hyperparallel`, or `~/.cache/hyperparallel`; made private if new."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "hyperparallel"
    return private_folder(folder)


def private_folder(folder: Path) -> Path:
    """Make `folder` (mode 0700) with its parents, and return it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def key_of(facts: Mapping[str, object]) -> str:
    """Twenty hex digits that name what an entry was made from.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


@contextlib.contextmanager
def publish(path: Path) -> Iterator[Path]:
    """Give a temporary path to write; on a clean exit it becomes `path`, else it is removed.

    Raises `OSError` naming the path, the bytes written so far and the bytes free when the disk
    is full or a size limit is met.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Made private before the first byte: the mode is not that of the process's umask.
        os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        yield temporary
        # Before the rename: after a power cut the name must not stand for an empty file.
        sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise _with_sizes(error, path, temporary) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_leftovers(path: Path) -> None:
    """Remove temporary files that killed writers of `path` left; call it while holding its lock."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` (a lock file) against other processes of this machine."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # closing releases the lock


def _with_sizes(error: OSError, path: Path, temporary: Path) -> OSError:
    written = temporary.stat().st_size if temporary.exists() else 0
    try:
        status = os.statvfs(path.parent)
        free = f"{status.f_bavail * status.f_frsize} bytes free"
    except (OSError, AttributeError):
        free = "free space unknown"
    reason = error.strerror or str(error)
    message = f"cannot write {path}: {reason} after {written} bytes ({free})"
    return OSError(error.errno or 0, message)
