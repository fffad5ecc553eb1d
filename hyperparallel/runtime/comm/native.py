"""Builds the shared-memory transport from its C++ source, once per machine and source.

The system compiler is called directly; the library goes to a private cache folder under a name made
of source, flags and processor, by atomic rename, so a killed build leaves nothing that anybody
waits for. Ranks that start together build once: the others wait on a file lock, which dies with its
holder.

Leaves out what the library does (`_shm.cpp`, `shm.py`).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("_shm.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC")
BUILD_SECONDS = 120

_PTR, _INT, _SIZE, _U32, _LONG = (
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_uint32,
    ctypes.c_long,
)
_SIGNATURES = {
    "hp_size": (_SIZE, [_INT, _U32, _SIZE, _U32, _SIZE]),
    "hp_open": (_PTR, [_INT, _INT, _INT, _U32, _SIZE, _U32, _SIZE, _PTR]),
    "hp_all_reduce": (_PTR, [_PTR, _PTR, _PTR, _SIZE, _U32, _U32]),
    "hp_all_gather": (_PTR, [_PTR, _PTR, _PTR, _PTR, _SIZE, _SIZE, _U32]),
    "hp_reduce_scatter": (_PTR, [_PTR, _PTR, _PTR, _PTR, _SIZE, _SIZE, _U32, _U32]),
    "hp_all_to_all": (_PTR, [_PTR] * 4 + [_SIZE, _SIZE, _PTR, _SIZE, _SIZE, _U32]),
    "hp_permute": (_PTR, [_PTR, _PTR, _SIZE, _PTR, _SIZE, _PTR, _INT, _INT, _U32]),
    "hp_wait": (_INT, [_PTR, _LONG, _LONG, _PTR]),
}


class BuildError(Exception):
    """Why there is no native library here."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, built first if need be; calls release the GIL. Raises `BuildError`."""
    try:
        loaded = ctypes.CDLL(str(build_library()))
    except OSError as error:
        raise BuildError(str(error)) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def build_library(folder: Path | None = None) -> Path:
    """The path of the built library; `BuildError` with the reason when it cannot be built."""
    if sys.platform != "linux":
        raise BuildError(f"futexes and memfd are Linux's, this is {sys.platform}")
    folder = folder or _private_folder()
    key = hashlib.sha256()
    for file in sorted(SOURCE.parent.glob("_shm*.cpp")):
        key.update(file.read_bytes())
    key.update("\0".join((*FLAGS, _processor())).encode())
    target = folder / f"shm-{key.hexdigest()[:20]}.so"
    if target.exists():
        return target
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next((c for c in compilers if c and shutil.which(c)), None)
    if compiler is None:
        raise BuildError("no C++ compiler (set CXX, or install g++)")
    with open(folder / "lock", "w") as lock:
        # A lock of the kernel's, not a lock file: it ends with its holder, however that ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    fresh = target.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(fresh)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if done.returncode:
            raise BuildError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        # By rename: another process loads the whole library or none, also when this one is killed.
        os.replace(fresh, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)


def _private_folder() -> Path:
    """A folder that nobody else can write to: what lies in it will be loaded."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "hyperparallel" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return folder
    except OSError:
        pass  # no home, or a read-only one
    folder = Path(tempfile.gettempdir()) / f"hyperparallel-native-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise BuildError(f"no folder to build in: {error}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise BuildError(f"{folder} is not a private folder")
    return folder


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by different machines."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
