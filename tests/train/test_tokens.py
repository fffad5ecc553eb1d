"""The token cache: round trips, reuse, privacy, damage, a full disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyperparallel.errors import DataError
from hyperparallel.train.cache import cache_folder
from hyperparallel.train.tokenizer import MIN_VOCAB, load_tokenizer, train_tokenizer
from hyperparallel.train.tokens import open_tokens, prepare_corpus, write_tokens

pytestmark = pytest.mark.pure

TEXT = "the quick brown fox jumps over the lazy dog; été 東京 🙂\n" * 40


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "b.txt").write_text(TEXT.upper(), encoding="utf-8")
    return folder


def test_tokens_decode_to_the_text_with_one_end_per_document(data: Path, tmp_path: Path) -> None:
    corpus = prepare_corpus(data, vocab_size=300, folder=tmp_path / "cache")
    ids = corpus.tokens.ids.tolist()
    assert ids.count(corpus.tokenizer.end_id) == 2 and ids[-1] == corpus.tokenizer.end_id
    assert sorted(corpus.tokenizer.decode(ids).splitlines()) == sorted(
        (TEXT + TEXT.upper()).splitlines()
    )
    assert corpus.tokens.vocab_size == 300 > max(ids)
    corpus.tokens.verify()


def test_second_run_reads_the_cache_and_any_change_makes_a_new_entry(
    data: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = prepare_corpus(data, vocab_size=300, folder=cache).tokens
    written = first.path.stat().st_mtime_ns
    again = prepare_corpus(data, vocab_size=300, folder=cache).tokens
    assert again.path == first.path and again.path.stat().st_mtime_ns == written
    paths = {first.path}
    paths.add(prepare_corpus(data, vocab_size=280, folder=cache).tokens.path)
    paths.add(prepare_corpus(data, vocab_size=300, max_bytes=500, folder=cache).tokens.path)
    (data / "b.txt").write_text("other")
    paths.add(prepare_corpus(data, vocab_size=300, folder=cache).tokens.path)
    assert len(paths) == 4


def test_cache_is_private(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    prepare_corpus(data, vocab_size=300)
    folder = cache_folder()
    assert folder == tmp_path / "xdg" / "hyperparallel"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert not [path for path in folder.iterdir() if path.suffix == ".tmp"]


def test_damaged_or_short_entries_are_made_again(data: Path, tmp_path: Path) -> None:
    path = prepare_corpus(data, vocab_size=300, folder=tmp_path / "cache").tokens.path
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"bytes as .* says"):
        open_tokens(path)
    prepare_corpus(data, vocab_size=300, folder=tmp_path / "cache")
    assert path.read_bytes() == whole
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match="hash"):
        open_tokens(path).verify()


def test_a_vocabulary_over_65536_uses_32_bits(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.backend.add_tokens([f"<extra {i}>" for i in range(66_000)])
    path = tmp_path / "t.bin"
    write_tokens(path, tokenizer, ["fox <extra 65999>"], {})
    tokens = open_tokens(path)
    assert tokens.ids.dtype == np.uint32 and tokens.ids.max() > 65_535


def test_huge_documents_are_cut_for_encoding_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperparallel.train.tokens._PIECE_CHARS", 100)
    monkeypatch.setattr("hyperparallel.train.tokens._BATCH_CHARS", 250)
    tokenizer = train_tokenizer([TEXT], 300)
    write_tokens(tmp_path / "t.bin", tokenizer, [TEXT, "x"], {})
    ids = open_tokens(tmp_path / "t.bin").ids.tolist()
    assert tokenizer.decode(ids) == TEXT + "x" and ids.count(tokenizer.end_id) == 2


def test_local_hugging_face_tokenizer(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tok"
    folder.mkdir()
    trained = train_tokenizer([TEXT], 290)
    trained.backend.add_special_tokens(["</s>"])
    trained.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    corpus = prepare_corpus(data, folder, folder=tmp_path / "cache")
    assert corpus.tokenizer.end_id == trained.backend.token_to_id("</s>") == 290
    assert corpus.tokens.ids[-1] == 290


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=f"at least {MIN_VOCAB}"):
        train_tokenizer(["x"], 256)


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="without text"):
        prepare_corpus(tmp_path, folder=tmp_path / "cache")


def test_full_disk_names_path_and_sizes_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    prepare_corpus(data, vocab_size=300, folder=cache)
    for path in cache.glob("tokens-*"):
        path.unlink()
    script = (
        "import resource, sys\n"
        "from hyperparallel.train.tokens import prepare_corpus\n"
        "from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    prepare_corpus(Path(sys.argv[1]), vocab_size=300, folder=Path(sys.argv[2]))\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(data), str(cache)],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
    )  # fmt: skip
    assert "tokens-" in done.stdout and "bytes free" in done.stdout
    assert "after 1000 bytes" in done.stdout
    assert not [p for p in cache.iterdir() if "tokens-" in p.name and p.suffix != ".lock"]


def test_leftovers_of_a_killed_writer_are_removed(data: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = prepare_corpus(data, vocab_size=300, folder=cache).tokens.path
    path.unlink()
    leftover = cache / f".{path.name}.999999.tmp"
    leftover.write_bytes(b"half")
    prepare_corpus(data, vocab_size=300, folder=cache)
    assert path.is_file() and not leftover.exists()
