"""What this machine has, read from the system and from torch.

Every reading is a `Finding`: a name, what was found, and whether that is good enough for a run.
Limits that a container sets (cores, memory) count before what the hardware has. Nothing is changed,
and nothing outside this machine is asked.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperparallel.errors import UserError
from hyperparallel.plan.wording import bytes_words
from hyperparallel.runtime.host import usable_cores

# Tensors shared between local processes lie in /dev/shm, which containers often cap at 64 MB.
SMALL_SHARED_BYTES = 256_000_000
SMALL_MEMORY_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Finding:
    """One reading. `good` is None where a lack costs speed or a feature, but not the run."""

    name: str
    found: str
    good: bool | None = True
    advice: str = ""


def findings() -> list[Finding]:
    """Read everything; the order is the order of a report."""
    found = [_python(), *_cores(), _memory(), _shared_memory(), _disk(Path.cwd()), _loopback()]
    found += [_compiler(), *_settings(), *_packages()]
    return [*found, *_torch()]


def _settings() -> list[Finding]:
    """The variables of ours that are set; one that no job would start with."""
    from hyperparallel.runtime.comm.settings import read_settings

    try:
        return [Finding(name, value) for name, value in read_settings().items()]
    except UserError as error:
        return [Finding("environment", str(error), False)]


def num_cores() -> int:
    """Cores this process may keep busy: its own, or the container's share where that is smaller.

    >>> num_cores() >= 1
    True
    """
    allowed = usable_cores()
    quota = _cgroup("cpu.max")
    if quota and quota[0] != "max":
        return max(1, min(allowed, int(quota[0]) // int(quota[1])))
    return allowed


def _cgroup(name: str) -> list[str]:
    try:
        return (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").split()
    except OSError:
        return []


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 10)
    found = f"{version}, {platform.system()} {platform.machine()}"
    return Finding("python", found, good, "" if good else "3.10 or newer is needed")


def _cores() -> Iterator[Finding]:
    cores = num_cores()
    yield Finding("cores", str(cores), None if cores < 2 else True,
                  "ranks will take turns on one core" if cores < 2 else "")  # fmt: skip
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        yield Finding("OMP_NUM_THREADS", threads)


def _memory() -> Finding:
    total, free = memory_bytes()
    if not total:
        return Finding("memory", "unknown", None)
    good = free >= SMALL_MEMORY_BYTES
    advice = "" if good else f"a rank takes about half a GB; {bytes_words(free)} is little"
    found = f"{bytes_words(total)}, {bytes_words(free)} available"
    return Finding("memory", found, good or None, advice)


def memory_bytes() -> tuple[int, int]:
    """(total, available) memory of this machine or container; zeros where the system doesn't say."""
    lines = _meminfo()
    total, free = lines.get("MemTotal", 0), lines.get("MemAvailable", 0)
    limit = _cgroup("memory.max")
    if limit and limit[0] != "max":
        used = int((_cgroup("memory.current") or ["0"])[0])
        total = min(total, int(limit[0])) if total else int(limit[0])
        free = min(free, max(0, total - used)) if free else total - used
    return total, free


def _meminfo() -> dict[str, int]:
    try:
        rows = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {row.split(":")[0]: int(row.split()[1]) * 1024 for row in rows if row.endswith("kB")}


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.exists():
        return Finding("shared memory", "no /dev/shm", None, "data is copied through pipes instead")
    total = shutil.disk_usage(path).total
    good = total >= SMALL_SHARED_BYTES
    advice = "" if good else "start the container with a larger --shm-size"
    return Finding("shared memory", bytes_words(total), good or None, advice)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    good = free > 1_000_000_000
    advice = "" if good else "checkpoints and the token cache need room"
    return Finding("disk", f"{bytes_words(free)} free here", good or None, advice)


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("loopback", str(error), False, "ranks find each other on 127.0.0.1")
    return Finding("loopback", "a port can be opened")


def _compiler() -> Finding:
    names = [os.environ.get("CXX", ""), "g++", "clang++"]
    found = next((shutil.which(name) for name in names if name and shutil.which(name)), None)
    if found:
        return Finding("C++ compiler", found)
    return Finding("C++ compiler", "none", None, "compile=True needs one; runs work without")


def _packages() -> Iterator[Finding]:
    for name in ("numpy", "transformers", "tokenizers", "safetensors", "pydantic", "highspy"):
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", False, f"pip install {name}")


def _torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken install raises anything from ImportError to OSError
        advice = "pip install 'torch>=2.13,<2.14'"
        yield Finding("torch", f"cannot be imported: {error}", False, advice)
        return
    good = torch.__version__.split("+")[0].startswith("2.13.")
    advice = "" if good else "2.13 is what private interfaces were checked on"
    yield Finding("torch", torch.__version__, good, advice)
    if not dist.is_available():
        yield Finding("torch.distributed", "not built in", False, "install a build that has it")
        return
    gloo = dist.is_gloo_available()
    yield Finding("gloo", "available" if gloo else "missing", gloo,
                  "" if gloo else "ranks on CPU talk over gloo")  # fmt: skip
    nccl = dist.is_nccl_available()
    version = _said(lambda: _nccl_version(torch)) if nccl else "not built in"
    yield Finding("NCCL", version, nccl or None)
    yield from _devices(torch)


def _nccl_version(torch: Any) -> str:
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _devices(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "not built in"
        yield Finding("CUDA", f"no device ({built})", None)
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        size = bytes_words(properties.total_memory)
        yield Finding(f"CUDA device {index}", f"{properties.name}, {size}")


def _said(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:
        return f"present, version unknown ({error})"
