"""Where training text comes from: the standard library at hand, or a user's files.

With no `--data`, the text is the source of the running interpreter's own standard library
(about 13 MB without its tests): real, always there, and the same for everybody on one Python
version. `--data` takes a text file, a `.jsonl` file (one object a line with a `text` field) or a
folder of those. Files are read in an order fixed by a hash of their relative names, so that a
prefix of the text is a fair sample rather than everything that begins with "a".

Leaves out: compressed files, downloads, and encodings other than UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyperparallel.errors import DataError

TEXT_SUFFIXES = (".jsonl", ".md", ".py", ".rst", ".txt")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idle_test"}


@dataclass(frozen=True)
class TextSource:
    """Files in reading order, of which at most `max_bytes` bytes of text are used (None: all)."""

    root: Path
    files: tuple[Path, ...]
    max_bytes: int | None = None

    def documents(self) -> Iterator[str]:
        """The documents in order; the last one is cut where `max_bytes` is reached."""
        left = self.max_bytes
        for path in self.files:
            for text in _read(path):
                raw_bytes = len(text.encode("utf-8"))
                if left is not None and raw_bytes > left:
                    # The cut may fall inside a character; its bytes are left out.
                    cut = text.encode("utf-8")[:left].decode("utf-8", errors="ignore")
                    if cut:
                        yield cut
                    return
                left = None if left is None else left - raw_bytes
                if text:
                    yield text

    def facts(self) -> dict[str, object]:
        """What the text depends on: names, sizes and change times of the files, and the cap."""
        stats = [(path, path.stat()) for path in self.files]
        return {
            "max_bytes": self.max_bytes,
            "files": [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        }


def text_source(data: str | Path | None = None, max_bytes: int | None = None) -> TextSource:
    """Find the text that `data` names; None is the interpreter's standard library.

    Raises `DataError` when the path is missing or holds no text.

    >>> text_source(max_bytes=1000).files[0].suffix
    '.py'
    """
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [path for path in root.rglob("*.py") if _wanted(path.relative_to(root))]
    else:
        root = Path(data).expanduser()
        if not root.exists():
            raise DataError("data", str(data), "an existing file or folder")
        if root.is_file():
            return TextSource(root.parent.absolute(), (root.absolute(),), max_bytes)
        root = root.absolute()
        found = [p for p in root.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file()]
    # Not the order of the file system, which differs between machines.
    files = sorted(found, key=lambda path: _order(path.relative_to(root)))
    if not files:
        allowed = "a folder with at least one file that ends in " + ", ".join(TEXT_SUFFIXES)
        raise DataError("data", str(root), allowed)
    return TextSource(root, tuple(files), max_bytes)


def _wanted(relative: Path) -> bool:
    return not _SKIPPED_FOLDERS.intersection(relative.parts)


def _order(relative: Path) -> tuple[bytes, str]:
    name = relative.as_posix()
    return hashlib.blake2b(name.encode(), digest_size=8).digest(), name


def _read(path: Path) -> Iterator[str]:
    try:
        if path.suffix == ".jsonl":
            yield from _read_jsonl(path)
        else:
            yield path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"{path} (byte {error.start} is not UTF-8)"
        raise DataError("data", where, "UTF-8 text", "a file converted to UTF-8") from error
    except OSError as error:
        raise DataError("data", f"{path} ({error.strerror})", "a readable file") from error


def _read_jsonl(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                given = f"{path}:{number} ({error.msg})"
                raise DataError("data", given, "one JSON object a line") from error
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                given = f"{path}:{number} ({keys or 'empty object'})"
                raise DataError("data", given, 'an object with a string field "text"')
            yield text
