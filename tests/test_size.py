"""The size check counts what stands in a folder, refuses crowded ones, and knows who imports a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks import size

pytestmark = pytest.mark.pure
PROJECT = Path(__file__).resolve().parent.parent


def write(project: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_no_folder_of_the_project_is_crowded() -> None:
    assert size.crowded(PROJECT) == []


@pytest.mark.parametrize("root", ["hyperparallel/room", "tests/room/corner"])
def test_a_crowded_folder_is_named_and_fails(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size, "__file__", str(tmp_path / "checks" / "size.py"))
    write(tmp_path, {f"{root}/a{i}.py": "" for i in range(size.MOST_FILES)})
    # Neither subfolders nor caches count for the folder above them.
    write(tmp_path, {f"{root}/below/a{i}.py": "" for i in range(3)})
    write(tmp_path, {f"{root}/__pycache__/a{i}.pyc": "" for i in range(3)})
    assert size.main() == 0
    assert "over 16" not in capsys.readouterr().out
    write(tmp_path, {f"{root}/kernel.cpp": ""})
    assert size.main() == 1
    said = capsys.readouterr().out
    assert f"over 16 files: {root} (17)" in said and said.count("over 16 files:") == 1


def test_importers_of_a_name_are_counted_by_file(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "hyperparallel/a.py": "def a_name_that_is_long(): ...\nLIMIT: int = 1\nclass _Hidden: ...",
            "hyperparallel/b.py": "from hyperparallel.a import LIMIT, a_name_that_is_long",
            "hyperparallel/c.py": "def f():\n    from .a import LIMIT\n    from .a import LIMIT",
            "tests/test_a.py": "from hyperparallel.a import LIMIT, _Hidden\nfrom os import path",
        },
    )
    assert size.fan_in(tmp_path) == {"a_name_that_is_long": 1, "LIMIT": 3, "f": 0}
    first, *_ = size.name_rows(tmp_path)[1:]
    assert first.split() == ["a_name_that_is_long", "1"]


def test_long_files_are_named_longest_first(tmp_path: Path) -> None:
    write(tmp_path, {"hyperparallel/a.py": "x = 1\n" * 401, "tests/b.py": "x = 1\n" * 402})
    write(tmp_path, {"checks/c.py": "x = 1\n" * 400})
    said = [line for line in size.report(tmp_path).splitlines() if line.startswith("over")]
    assert said == ["over 400 lines: tests/b.py (402)", "over 400 lines: hyperparallel/a.py (401)"]
