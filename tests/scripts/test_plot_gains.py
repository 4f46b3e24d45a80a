"""docs/gains.png shows what docs/speed.md says."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from scripts import plot_gains

TABLE = """Text.

| | 1 | 16 | 64, E4M3 | 256 |
|---|---|---|---|---|
| vLLM | 250 | 1303 | 99 | |
| with jitmx | 733 | 2384 | 100 | 11607 |
| another | 1 | 2 | 3 | 4 |

| | 8 |
|---|---|
| not of this table | 9 |
"""


def test_columns_that_both_rows_have_by_requests_are_taken() -> None:
    assert plot_gains.gains(TABLE) == [(1, 250, 733), (16, 1303, 2384)]


def test_the_image_of_the_documents_shows_the_figures_of_the_table() -> None:
    rows = plot_gains.gains((plot_gains.DOCS / "speed.md").read_text())
    assert len(rows) >= 5
    with Image.open(plot_gains.DOCS / "gains.png") as image:
        assert image.info["Description"] == plot_gains.shown(rows), "python scripts/plot_gains.py"


def test_bars_rise_as_high_as_their_figures(tmp_path: Path) -> None:
    """Of two pairs of bars, one twice as high as the other, with as many pixels of each colour."""
    path = tmp_path / "gains.png"
    plot_gains.draw([(1, 1000, 2000), (2, 2000, 4000)], path)
    with Image.open(path) as image:
        pixels = image.convert("RGB")
        for color in plot_gains.COLORS:
            wanted = tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))
            left, right = (
                sum(
                    pixels.getpixel((x, y)) == wanted
                    for x in range(side * pixels.width // 2, (side + 1) * pixels.width // 2)
                    for y in range(pixels.height)
                )
                for side in (0, 1)
            )
            assert 1.8 < right / left < 2.2
