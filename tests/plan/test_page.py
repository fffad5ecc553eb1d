"""The page is well-formed, complete, escaped, and loads nothing from anywhere."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from hyperparallel.layout import Mesh
from hyperparallel.plan.diagram import glyph
from hyperparallel.plan.page import html_page
from tests.plan.sample import llama

pytestmark = pytest.mark.pure
VOID = {"meta", "br", "input", "rect", "line"}


class Outline(HTMLParser):
    """Text, attributes, and whether every opened element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _read(page: str) -> Outline:
    outline = Outline()
    outline.feed(page)
    outline.close()
    assert outline.open == []
    return outline


def test_contains_every_parameter_and_collective() -> None:
    derived = llama()
    outline = _read(html_page(derived, "demo"))
    words = set(outline.text)
    assert {param.name for param in derived.params} <= words
    text = "\n".join(outline.text)
    for item in derived.communications:
        assert item.reason in text
    assert derived.plan.strip() in text
    assert len(set(outline.ids)) == len(outline.ids)


def test_is_self_contained() -> None:
    page = html_page(llama())
    outline = _read(page)
    loading = {"src", "href", "srcset", "action", "data", "xlink:href"}
    assert not loading & {name for name, _ in outline.attributes}
    assert not re.search(r"https?://|url\(|@import", page)
    assert "default-src 'none'" in page


def test_names_are_escaped() -> None:
    derived = llama(1)
    bad = '<b>"&'
    params = tuple(dataclasses.replace(p, reason=bad) for p in derived.params)
    moves = tuple(dataclasses.replace(c, module=bad, value=bad) for c in derived.communications)
    page = html_page(dataclasses.replace(derived, params=params, communications=moves), bad)
    _read(page)
    assert bad not in page


def test_a_large_mesh_is_not_drawn_rank_by_rank() -> None:
    mesh = Mesh((16, 16), ("dp", "tp"))
    derived = llama(1)
    layout = mesh("tp", None)
    param = dataclasses.replace(derived.params[0], stored=layout, used=layout)
    page = html_page(dataclasses.replace(derived, params=(param,)))
    assert "256 ranks" in page and "<td>255</td>" not in page


def test_glyph_fills_the_share_of_the_first_rank() -> None:
    mesh = Mesh((2, 4), ("dp", "tp"))
    for layout, share in (
        (mesh("dp", "tp"), 1 / 8),
        (mesh(None, ("dp", "tp")), 1 / 8),
        (mesh("tp"), 1 / 4),
        (mesh(None, None), 1.0),
    ):
        svg = glyph(layout)
        width, height = map(float, re.findall(r'svg width="(\d+)" height="(\d+)"', svg)[0])
        filled = re.findall(r'rect width="([\d.]+)" height="([\d.]+)"', svg)[0]
        area = float(filled[0]) * float(filled[1])
        assert area == pytest.approx(share * width * height, rel=0.03)  # one decimal in the SVG
