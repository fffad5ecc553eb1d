"""Meshes and overrides are read as written or refused with what to write."""

from __future__ import annotations

import pytest

from hyperparallel.cli.options import parse_mesh, parse_overrides
from hyperparallel.errors import UserError
from hyperparallel.layout import Mesh

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=4", Mesh((4,), ("dp",))),
        ("dp=2,tp=2", Mesh((2, 2), ("dp", "tp"))),
        (" dp = 2 , tp=1", Mesh((2, 1), ("dp", "tp"))),
    ],
)
def test_meshes_are_read(text: str, mesh: Mesh) -> None:
    assert parse_mesh(text) == mesh


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=", "=2", "dp=two", "dp=2;tp=2", "dp=-1", "dp=2,,tp=2"]
)
def test_other_meshes_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--mesh.*write dp=2,tp=2 instead"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["dp=2,dp=2", "dp=0"])
def test_meshes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_mesh(text)


def test_overrides_keep_equals_signs_in_values() -> None:
    assert parse_overrides(["a=b=c", "x.y=1"]) == {"a": "b=c", "x.y": "1"}


@pytest.mark.parametrize("words", [["a"], ["=1"], ["a=1", "a=2"]])
def test_other_overrides_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="override"):
        parse_overrides(words)
