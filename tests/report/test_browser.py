"""`jitmx report` in a headless browser: it loads nothing, sorts, and can be read on a telephone and in the dark."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jitmx import settings
from jitmx.cli import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDED = bool(os.environ.get("REQUIRE_BROWSER"))
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-sync",
             "--disable-component-update"]  # fmt: skip

if not NEEDED and (BROWSER is None or importlib.util.find_spec("playwright") is None):
    pytest.skip("takes playwright and Chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert BROWSER is not None, "REQUIRE_BROWSER is set, and there is no Chromium"
    with sync_playwright() as player:
        found = player.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page of a cache whose folder has a name with markup in it."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JITMX_CACHE_DIR", str(folder / "<img src=x onerror=alert(1)>"))
        settings.reload()
        words = ("report", "--arch", "sm_90,sm_121", "-o", str(folder / "report.html"))
        done = CliRunner().invoke(main, words, prog_name="jitmx")
        assert done.exit_code == 0, done.output
    settings.current.cache_clear()
    yield folder / "report.html"


class Opened:
    """The page as a browser has it, with what it asked for and complained of."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light", script: bool = True) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, java_script_enabled=script
        )
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.goto(path.as_uri())

    def column(self, caption: str, number: int) -> list[str]:
        """The cells of a column of a table."""
        table = self.page.locator("table", has=self.page.locator("caption", has_text=caption))
        return [str(text) for text in table.locator(f"tbody tr > :nth-child({number})").all_inner_texts()]

    def header(self, caption: str, number: int) -> Any:
        table = self.page.locator("table", has=self.page.locator("caption", has_text=caption))
        return table.locator(f"thead th:nth-child({number})")


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    found = Opened(browser, report)
    yield found
    found.context.close()


def test_it_asks_for_nothing_but_itself_and_has_no_complaint(opened, report) -> None:
    assert opened.asked == [report.as_uri()] and opened.complaints == []
    assert opened.page.locator("img").count() == 0
    assert "<img src=x onerror=alert(1)>" in opened.page.inner_text("main")


def test_it_has_every_part_and_a_drawn_roofline_for_each_card(opened) -> None:
    titles = opened.page.locator("h2").all_inner_texts()
    assert titles == ["Kernels", "Times and roofline", "Cache", "Settings", "Toolchain and machine"]
    plots = opened.page.get_by_role("img")
    assert plots.count() == 2
    for plot in plots.all():
        box = plot.bounding_box()
        assert box is not None and box["width"] > 300 and box["height"] > 150
        assert plot.locator("g.predicted").count() + plot.locator("g.measured").count() > 20
    assert opened.page.get_by_role("img", name="Roofline of NVIDIA GB10").count() == 1
    assert any("hardware (NVIDIA" in text for text in opened.column("Default kernels", 6))
    assert "JITMX_CACHE_DIR" in opened.column("Settings", 1)


def test_a_click_on_a_header_sorts_by_value_and_another_turns_it_round(opened) -> None:
    caption, number = "Typical calls", 7  # predicted us
    header = opened.header(caption, number)
    header.locator("button").click()
    values = [float(text.replace(",", "")) for text in opened.column(caption, number)]
    assert header.get_attribute("aria-sort") == "ascending"
    assert values == sorted(values) and values[0] < 3 and values[-1] > 1000
    header.locator("button").click()
    turned = [float(text.replace(",", "")) for text in opened.column(caption, number)]
    assert header.get_attribute("aria-sort") == "descending" and turned == values[::-1]


def test_what_has_no_value_comes_last_either_way(opened) -> None:
    caption, number = "Typical calls", 8  # measured us
    for _ in range(2):
        opened.header(caption, number).locator("button").click()
        cells = opened.column(caption, number)
        missing = cells.index("–")
        assert missing > 0 and set(cells[missing:]) == {"–"}


def test_a_table_is_sorted_from_the_keyboard(opened) -> None:
    opened.header("Settings", 3).locator("button").focus()
    opened.page.keyboard.press("Enter")
    assert opened.header("Settings", 3).get_attribute("aria-sort") == "ascending"
    sources = [text.casefold() for text in opened.column("Settings", 3)]
    assert sources.index("jitmx_cache_dir") > 0


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_is_no_wider_than_its_window(browser, report, width) -> None:
    found = Opened(browser, report, width=width)
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    assert float(found.page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")) >= 14
    found.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_light_and_dark(browser, report, scheme) -> None:
    found = Opened(browser, report, scheme=scheme)
    ink, paper, soft = found.page.evaluate(
        """() => {
            const of = (query, name) => getComputedStyle(document.querySelector(query))[name];
            return [of("body", "color"), of("body", "backgroundColor"), of("dt", "color")];
        }"""
    )
    assert _contrast(ink, paper) >= 7 and _contrast(soft, paper) >= 4.5
    assert (_light(paper) < 0.1) == (scheme == "dark")
    found.context.close()


def test_without_a_script_all_of_it_can_be_read(browser, report) -> None:
    found = Opened(browser, report, script=False)
    assert found.page.locator("table").count() >= 4 and found.page.get_by_role("img").count() == 2
    found.context.close()


def _light(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, by WCAG 2."""
    parts = [float(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_light(one), _light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
