"""Reads every table of a folder into cases; what cannot be expressed is named, never dropped."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.leaderboard.bridge import bridge_cases
from benchmarks.leaderboard.case import Case, Skipped
from benchmarks.leaderboard.foundry import foundry_case
from benchmarks.leaderboard.gpt import vtrain_case
from benchmarks.leaderboard.published import published_case
from hyperparallel.errors import UserError

Reader = Callable[[Mapping[str, str]], Iterator[Case | Skipped]]


def _one(read: Callable[[Mapping[str, str]], Case | Skipped]) -> Reader:
    def reader(row: Mapping[str, str]) -> Iterator[Case | Skipped]:
        yield read(row)

    return reader


READERS: Mapping[str, Reader] = {
    "validation_points": _one(published_case),
    "vtrain_multi": _one(lambda row: vtrain_case("vtrain_multi", row)),
    "vtrain_single": _one(lambda row: vtrain_case("vtrain_single", row)),
    "megatron_bridge_rows": bridge_cases,
    "llm_foundry_rows": _one(foundry_case),
}


def _reason(error: Exception) -> str:
    """Why a row is malformed."""
    if isinstance(error, KeyError):
        return f"no value in column {error.args[0]!r}"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def read_tables(folder: Path) -> tuple[list[Case], list[Skipped]]:
    """All cases of the known tables in `folder`, in file order, and the rows that make no case.

    A table may be missing or shorter. A row that is malformed is a `Skipped` with the reason.
    """
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for table, reader in READERS.items():
        path = folder / f"{table}.csv"
        if not path.exists():
            continue
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                try:
                    found = list(reader(row))
                except (
                    UserError,
                    LookupError,
                    ValueError,
                    TypeError,
                    ArithmeticError,
                    AttributeError,
                ) as error:
                    found = [Skipped(table, f"line {line}", _reason(error))]
                for item in found:
                    (cases if isinstance(item, Case) else skipped).append(item)  # type: ignore[arg-type]
    return cases, skipped
