"""The page of public names is what their docstrings say, each with an example that the doctests run."""

from __future__ import annotations

import pytest

import hyperparallel
from checks import api

pytestmark = pytest.mark.fake


def test_the_page_is_what_would_be_written() -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "run `make docs`"


def test_every_public_name_has_its_place_and_example(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(hyperparallel.__all__) == {"__version__", *(n for names in api.ROOMS.values() for n in names)}
    for wrong, words in ((["no_such_name"], "not once"), (None, "no example")):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
            if wrong:
                patch.setattr(hyperparallel, "__all__", [*hyperparallel.__all__, *wrong])
            else:
                patch.setattr(hyperparallel.Plan, "__doc__", "Words alone.")
            api.page()
