"""A file of token ids on disk, mapped into memory: one array, any size of text.

The file is the bare ids (uint16 while the vocabulary fits, else uint32, little endian), with a
JSON sidecar beside it: element type, count, vocabulary, a hash of the content and what it was made
from. All ranks of a machine map the same pages. Files are made in the user's cache folder under a
name that hashes the inputs and settings, so a second run starts at once, and a changed file or
setting makes a new entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hyperparallel.errors import DataError
from hyperparallel.train.cache import (
    cache_folder,
    key_of,
    lock,
    private_folder,
    publish,
    remove_leftovers,
)
from hyperparallel.train.text import TextSource, text_source
from hyperparallel.train.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

_FORMAT = 1  # raised when the meaning of a cache entry changes
_PIECE_CHARS = 1_000_000
_BATCH_CHARS = 4_000_000


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped array of token ids and the facts of its sidecar."""

    path: Path
    ids: npt.NDArray[np.unsignedinteger]
    vocab_size: int
    content_hash: str

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def verify(self) -> None:
        """Read the whole file; raise `DataError` when it is not what was written."""
        found = hashlib.blake2b(self.ids.tobytes(), digest_size=16).hexdigest()
        if found != self.content_hash:
            given = f"{self.path} (hash {found})"
            raise DataError("tokens", given, f"content with hash {self.content_hash}")


@dataclass(frozen=True)
class Corpus:
    """Token ids with the tokenizer that made them."""

    tokens: TokenFile
    tokenizer: TextTokenizer
    tokenizer_path: Path


def prepare_corpus(
    data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    *,
    vocab_size: int = 4096,
    max_bytes: int | None = None,
    sample_bytes: int = 2_000_000,
    folder: Path | None = None,
) -> Corpus:
    """Tokens of `data` (None: the standard library), from the cache where they are there already.

    `tokenizer` is a local folder with a Hugging Face tokenizer; None trains one of `vocab_size`
    tokens on the first `sample_bytes` bytes of the text. At most `max_bytes` bytes of text are
    used. Safe to call from several processes at once: the first builds, the others wait.

    Raises `DataError` for missing, empty or unreadable text, `OSError` when the disk is full.
    """
    source = text_source(data, max_bytes)
    folder = private_folder(folder) if folder else cache_folder()
    if tokenizer is None:
        tokenizer_path = _cached_tokenizer(source, vocab_size, sample_bytes, folder)
    else:
        given = Path(tokenizer).expanduser()
        tokenizer_path = given / "tokenizer.json" if given.is_dir() else given
    backend = load_tokenizer(tokenizer_path)
    facts = source.facts() | {"format": _FORMAT, "tokenizer": _file_hash(tokenizer_path)}
    path = folder / f"tokens-{key_of(facts)}.bin"
    with lock(path.with_suffix(".lock")):
        if not _is_whole(path):
            remove_leftovers(path)
            write_tokens(path, backend, source.documents(), facts)
    return Corpus(open_tokens(path), backend, tokenizer_path)


def write_tokens(
    path: Path, tokenizer: TextTokenizer, texts: Iterable[str], facts: dict[str, object]
) -> None:
    """Encode `texts` into the token file `path`, published whole with its sidecar.

    Raises `DataError` when there is no text, `OSError` (path and sizes) when the disk is full.
    """
    # Little endian whatever the machine: the file may be copied to another one.
    dtype = np.dtype("<u2") if tokenizer.vocab_size <= 1 << 16 else np.dtype("<u4")
    digest, count = hashlib.blake2b(digest_size=16), 0
    with publish(path) as temporary:
        with temporary.open("wb") as out:
            for pieces, ends in _batches(texts):
                for ids, is_end in zip(tokenizer.encode(pieces), ends, strict=True):
                    if is_end and tokenizer.end_id is not None:
                        ids.append(tokenizer.end_id)
                    raw = np.asarray(ids, dtype=dtype).tobytes()
                    digest.update(raw)
                    count += len(ids)
                    out.write(raw)
        if count == 0:
            raise DataError("data", "files without text", "at least one character of text")
        sidecar = {
            "dtype": dtype.str,
            "count": count,
            "vocab_size": tokenizer.vocab_size,
            "content_hash": digest.hexdigest(),
            "made_from": facts,
        }
        # The sidecar goes first: an array without one is not an entry, so a kill in between
        # leaves a sidecar whose count does not match, and the entry is made again.
        with publish(path.with_suffix(".json")) as side:
            side.write_text(json.dumps(sidecar, indent=1), encoding="utf-8")


def open_tokens(path: str | Path) -> TokenFile:
    """Map a token file; raises `DataError` when it or its sidecar is missing, short or damaged."""
    path = Path(path)
    side_path = path.with_suffix(".json")
    try:
        side = json.loads(side_path.read_text(encoding="utf-8"))
        dtype, count = np.dtype(side["dtype"]), int(side["count"])
        found_bytes = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError("tokens", f"{path} ({error})", "a token file with its sidecar") from error
    if found_bytes != count * dtype.itemsize:
        allowed = f"{count * dtype.itemsize} bytes as {side_path.name} says"
        raise DataError("tokens", f"{path} of {found_bytes} bytes", allowed)
    ids = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    return TokenFile(path, ids, int(side["vocab_size"]), str(side["content_hash"]))


def _cached_tokenizer(source: TextSource, vocab_size: int, sample_bytes: int, folder: Path) -> Path:
    used = sample_bytes if source.max_bytes is None else min(sample_bytes, source.max_bytes)
    sample = TextSource(source.root, source.files, used)
    key = key_of(sample.facts() | {"format": _FORMAT, "vocab_size": vocab_size})
    path = folder / f"tokenizer-{key}.json"
    with lock(path.with_suffix(".lock")):
        if not path.is_file():
            trained = train_tokenizer(sample.documents(), vocab_size)
            with publish(path) as temporary:
                temporary.write_text(trained.backend.to_str(), encoding="utf-8")
    return path


def _is_whole(path: Path) -> bool:
    try:
        open_tokens(path)
    except DataError:
        return False
    return True


def _file_hash(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return "missing"  # load_tokenizer says so, better


def _batches(texts: Iterable[str]) -> Iterator[tuple[list[str], list[bool]]]:
    """Pieces of documents in lists of bounded size, and which of them end a document."""
    pieces: list[str] = []
    ends: list[bool] = []
    size = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARS):
            pieces.append(text[start : start + _PIECE_CHARS])
            ends.append(start + _PIECE_CHARS >= len(text))
            size += len(pieces[-1])
            if size >= _BATCH_CHARS:
                yield pieces, ends
                pieces, ends, size = [], [], 0
    if pieces:
        yield pieces, ends
