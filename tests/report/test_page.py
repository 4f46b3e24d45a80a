"""The page is one file that loads nothing, and shows what is on disk as text."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from jitmx.report import roofline
from jitmx.report.page import Column, Plot, Section, Table, render
from jitmx.report.roofline import Point, Roof

VOID = {"meta", "link", "br", "img", "input", "hr", "base", "source", "area", "embed", "col", "track", "wbr"}
COLUMNS = (Column("name", "Name"), Column("value", "Value", True, "us"), Column("note", "Note"))
ROOF = Roof("a card", 1000.0, 100.0)


class Page(HTMLParser):
    """Elements in order, with what is open around them; an error where they are not well nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page(rows: list[dict[str, Any]], title: str = "a report", **section: Any) -> str:
    return render(title, {"Path": title}, [Section("Some", tables=[Table("caption", COLUMNS, rows)], **section)])


FOREIGN = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</table></style></script>", "{{ 7 * 7 }}",
    "a\x1b[31mred", "\u202eturned", "\udcff not text", "&lt;b&gt;", "'; --", "\x00", "javascript:alert(1)",
]  # fmt: skip


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_name_is_text_wherever_it_stands(text) -> None:
    rows = [{"name": text, "value": 1, "note": text}]
    plot = Plot(roofline.draw([Point(text, text, 1.0, 1.0, True)], Roof(text, 10.0, 1.0)), text)
    made = render(text, {text: text}, [Section(text, [text], [plot], [Table(text, COLUMNS, rows)])])
    plain = render("t", {"t": "t"}, [
        Section("t", ["t"], [Plot(roofline.draw([Point("t", "t", 1.0, 1.0, True)], Roof("t", 10.0, 1.0)), "t")],
                [Table("t", COLUMNS, [{"name": "t", "value": 1, "note": "t"}])])
    ])  # fmt: skip
    assert [name for name, _ in Page(made).elements] == [name for name, _ in Page(plain).elements]
    made.encode()
    assert text not in ("{{ 7 * 7 }}",) or text in Page(made).texts


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_name_leaves_the_elements_of_the_page_as_they_are(name, note) -> None:
    made, plain = page([{"name": name, "value": 1.5, "note": note}]), page([{"name": "t", "value": 1.5, "note": "t"}])
    assert [tag for tag, _ in Page(made).elements] == [tag for tag, _ in Page(plain).elements]
    made.encode()


def test_the_page_loads_nothing_and_lets_nothing_but_its_own_script_run() -> None:
    made = page([{"name": "n", "value": 1, "note": None}])
    found = Page(made)
    assert not {tag for tag, _ in found.elements} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in found.elements:
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "style") and not name.startswith("on"), (tag, name)
            assert name != "href" or (value or "").startswith("#"), value
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", made)
    policy = next(item["content"] for item in found.all("meta") if item.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        body = re.search(rf"<{tag}>(.*?)</{tag}>", made, re.DOTALL)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_tables_have_captions_and_headers_and_the_plot_words_for_it() -> None:
    plot = Plot(roofline.draw([Point("k", "f", 3.0, 2.0, False)], ROOF), "what it shows")
    found = Page(page([{"name": "n", "value": 1, "note": "x"}], plots=[plot]))
    assert found.all("html")[0]["lang"] == "en" and len(found.all("main")) == len(found.all("h1")) == 1
    assert len(found.all("caption")) == len(found.all("table")) == 1
    assert [item.get("scope") for item in found.all("th")] == ["col"] * 3 + ["row"]
    svg = found.all("svg")[0]
    assert svg["role"] == "img"
    named = str(svg["aria-labelledby"]).split()
    assert {item.get("id") for tag, item in found.elements if tag in ("title", "desc")} >= set(named)
    assert any("operations a byte" in text and "Nearest to it is k" in text for text in found.texts)
    assert {item.get("name") for item in found.all("meta")} >= {"viewport", "color-scheme"}


def test_nothing_is_a_dash_and_a_number_keeps_its_value_for_sorting() -> None:
    made = page([{"name": "n", "value": 1234567, "note": None}, {"name": "m", "value": None, "note": "x"}])
    assert 'data-value="1234567">1,234,567<' in made and made.count("<bdi>–</bdi>") == 1
    assert '<td class="number">–</td>' in made


@given(
    st.lists(
        st.builds(
            Point, st.just("k"), st.sampled_from("abcdefgh"), st.floats(0, 1e9), st.floats(0, 1e6), st.booleans()
        ),
        max_size=20,
    ),
    st.builds(Roof, st.just("c"), st.floats(1, 1e6), st.floats(0.1, 1e5)),
)  # fmt: skip
def test_every_point_lies_within_the_plot_and_no_roof_leaves_it(points, roof) -> None:
    drawn = roofline.draw(points, roof)
    shown = [point for point in points if point.intensity >= 1e-9 and point.teraflops >= 1e-9]
    assert bool(drawn) == bool(shown) and isinstance(drawn, Markup)
    if not shown:
        return
    found = Page(str(drawn))
    marks = [item for tag, item in found.elements if tag == "g" and str(item["class"]).startswith("family")]
    assert len(marks) == len(shown) + len({point.family for point in shown})
    for tag, item in found.elements:
        if tag == "circle":
            assert 0 <= float(item["cx"] or -1) <= 760 and 0 <= float(item["cy"] or -1) <= 440
    line = next(item for tag, item in found.elements if tag == "polyline")
    for place in str(line["points"]).split():
        x, y = map(float, place.split(","))
        assert 0 <= x <= 760 and 0 <= y <= 440, place


def test_a_point_on_the_roof_is_drawn_on_it() -> None:
    drawn = str(roofline.draw([Point("k", "f", 10.0, ROOF.at(10.0), True)], ROOF))
    circle = re.search(r'<g class="family0 measured"><title>[^<]*</title><circle cx="([\d.]+)" cy="([\d.]+)"', drawn)
    line = re.search(r'points="([^"]+)"', drawn)
    assert circle is not None and line is not None
    (x1, y1), (x2, y2) = (map(float, place.split(",")) for place in line[1].split()[:2])
    x, y = float(circle[1]), float(circle[2])
    assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.3)
