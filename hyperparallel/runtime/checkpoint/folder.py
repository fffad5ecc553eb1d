"""The folder of a run's checkpoints: complete ones, the newest, and what killed saves left.

    step_000100/            complete: it was renamed to this name after all ranks had written
    step_000200.tmp/        being written, or left by a killed run: never read, removed later
    step_000100.replaced/   an older save of the same step, kept until the new one is in place
    latest                  the name of the newest complete one, replaced by rename

Rank 0 alone changes this folder; only names and renames are dealt with here, not contents.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from hyperparallel.errors import CheckpointError, nearest
from hyperparallel.runtime.checkpoint.index import INDEX_NAME

_NAME = re.compile(r"step_(\d+)$")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` stands.

    >>> step_folder(Path("run"), 12).name
    'step_000012'
    """
    return root / f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """The step that a checkpoint folder's name says; -1 for another name."""
    match = _NAME.match(folder.name)
    return int(match.group(1)) if match else -1


def complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest publication first."""
    found = [p for p in root.glob("step_*") if step_of(p) >= 0 and (p / INDEX_NAME).is_file()]
    return sorted(found, key=lambda p: ((p / INDEX_NAME).stat().st_mtime_ns, step_of(p)))


def newest(root: Path) -> Path | None:
    """The checkpoint that `latest` names, else the newest complete one, else None."""
    try:
        name = (root / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        name = ""
    if _NAME.match(name) and (root / name / INDEX_NAME).is_file():
        return root / name
    found = complete(root)
    return found[-1] if found else None


def find_checkpoint(root: Path, step: int | None) -> Path:
    """The checkpoint of `step`, None for the newest; `CheckpointError` naming what there is."""
    folder = newest(root) if step is None else step_folder(root, step)
    if folder is None or not (folder / INDEX_NAME).is_file():
        there = [path.name for path in complete(root)]
        wanted = "newest" if folder is None else folder.name
        close = nearest(wanted, there) if there else "no checkpoint"
        allowed = f"one of {', '.join(there) or 'none: the folder has no complete checkpoint'}"
        raise CheckpointError("checkpoint", f"{root} ({wanted})", allowed, close if there else None)
    return folder


def start(root: Path, step: int) -> Path:
    """Clear what killed saves left, and make the temporary folder of a new save."""
    make_folder(root)
    for leftover in root.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    for old in root.glob("step_*.replaced"):
        target = old.with_suffix("")
        if target.exists():
            shutil.rmtree(old)
        else:  # killed between the two renames of `publish`
            os.rename(old, target)
    folder = temporary(root, step)
    folder.mkdir()
    return folder


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; `CheckpointError` where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        allowed = f"a folder that can be made ({error.strerror})"
        raise CheckpointError("folder", str(folder), allowed) from None


def temporary(root: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is written."""
    return step_folder(root, step).with_suffix(".tmp")


def publish_checkpoint(root: Path, step: int, keep: int) -> Path:
    """Give the finished temporary folder its name, move `latest`, and remove all but `keep`."""
    target, written = step_folder(root, step), temporary(root, step)
    # Its entries before its name: after a power cut the new name must not stand for an empty folder.
    sync(written)
    old = target.with_suffix(".replaced")
    if target.exists():
        # A rename does not replace a folder that has something in it. A kill here: `start` turns it back.
        os.rename(target, old)
    os.rename(written, target)
    sync(root)
    pointer = root / "latest.tmp"
    with pointer.open("w", encoding="utf-8") as out:
        out.write(target.name + "\n")
        out.flush()
        os.fsync(out.fileno())
    os.replace(pointer, root / "latest")
    sync(root)
    shutil.rmtree(old, ignore_errors=True)
    if keep > 0:
        others = [path for path in complete(root) if path != target]
        # Not below 0: a negative end would count from the back, and remove some of fewer than `keep`.
        for path in others[: max(0, len(others) - (keep - 1))]:
            _remove(path)
    return target


def abandon(root: Path, step: int) -> None:
    """Remove the temporary folder of a save that failed."""
    shutil.rmtree(temporary(root, step), ignore_errors=True)


def sync(path: Path) -> None:
    """Return once the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Rename first: a removal that is killed leaves a temporary folder, not half a checkpoint."""
    doomed = folder.with_suffix(".tmp")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)
