"""Text sources: what is found, in which order, and what each bad input says."""

import json
from pathlib import Path

import pytest

from hyperparallel.errors import DataError
from hyperparallel.train.text import text_source

pytestmark = pytest.mark.pure


def test_the_standard_library_is_at_hand_and_in_a_fixed_order() -> None:
    source = text_source(max_bytes=200_000)
    assert "".join(source.documents()) == "".join(text_source(max_bytes=200_000).documents())
    assert not any("site-packages" in path.parts for path in source.files)
    first_letters = {path.relative_to(source.root).as_posix()[0] for path in source.files[:20]}
    assert len(first_letters) > 5  # a prefix is a sample, not an alphabetical head


@pytest.mark.parametrize("cap", [0, 1, 3, 4, 5, 7, 100])
def test_max_bytes_cuts_exactly_and_never_inside_a_character(tmp_path: Path, cap: int) -> None:
    (tmp_path / "a.txt").write_text("aéz", encoding="utf-8")  # 4 bytes
    (tmp_path / "b.txt").write_text("bb", encoding="utf-8")
    text = "".join(text_source(tmp_path, cap).documents())
    whole = "".join(text_source(tmp_path).documents())
    assert whole.startswith(text)
    assert len(text.encode()) <= cap
    assert len(text.encode()) >= min(cap, 6) - 1  # at most the half of an é is lost


def test_folder_takes_text_and_jsonl_and_leaves_the_rest(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    (tmp_path / "b.md").write_text("three")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff")
    assert sorted(text_source(tmp_path).documents()) == ["one", "three", "two"]


def test_a_single_file_of_any_suffix(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("hello")
    assert list(text_source(tmp_path / "notes").documents()) == ["hello"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (json.dumps({"content": "x"}), "content"),
        (json.dumps({"text": 3}), "text"),
        (json.dumps(["text"]), "list"),
        ("{}", "empty object"),
        ("{oops", "one JSON object a line"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"data\.jsonl:2") as caught:
        list(text_source(path).documents())
    assert word in str(caught.value)


def test_missing_path_empty_folder_and_binary_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="existing file or folder"):
        text_source(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"\.jsonl, \.md, \.py"):
        text_source(tmp_path)
    (tmp_path / "x.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(DataError, match=r"x\.txt \(byte 3 is not UTF-8\)"):
        list(text_source(tmp_path).documents())


def test_unreadable_file_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("abc")
    source = text_source(path)
    path.unlink()  # as root a mode of 000 can still be read; a file that is gone cannot
    with pytest.raises(DataError, match="readable file"):
        list(source.documents())
