"""Draw docs/gains.png: what jitmx gains in vLLM, of the first two rows of the first table of docs/speed.md.

    python scripts/plot_gains.py

The first row is vLLM alone and the second vLLM with jitmx, by requests at a time; columns that either lacks are left
out. The image says under "Description" which figures it shows.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

DOCS = Path(__file__).resolve().parents[1] / "docs"
LABELS = ("vLLM 0.33: Triton experts, cuBLAS, FlashAttention 3", "with jitmx: experts, QKV, O, lm_head, attention")
COLORS = ("#9aa4b1", "#2f7d4f")


def gains(text: str) -> list[tuple[int, int, int]]:
    """Requests, and tokens a second without and with jitmx, of a document's first table."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, alone, served = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4])
    rows = zip(header, alone, served, strict=True)
    return [(int(one), int(two), int(three)) for one, two, three in rows if all(map(str.isdecimal, (one, two, three)))]


def shown(rows: list[tuple[int, int, int]]) -> str:
    """The figures in words."""
    return "; ".join(f"{requests} requests: {alone} and {served} tokens a second" for requests, alone, served in rows)


def draw(rows: list[tuple[int, int, int]], path: Path) -> None:
    """Bars side by side, each pair under its ratio."""
    figure, axes = pyplot.subplots(figsize=(8.8, 3.7))
    for side, (label, color) in enumerate(zip(LABELS, COLORS, strict=True)):
        heights = [row[1 + side] for row in rows]
        bars = axes.bar([i + 0.38 * (side - 0.5) for i in range(len(rows))], heights, 0.38, label=label, color=color)
        texts = [f"{row[2]}\n{row[2] / row[1]:.2f}x" if side else str(row[1]) for row in rows]
        axes.bar_label(bars, texts, padding=1, fontsize=8.5)
    axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows])
    axes.set(xlabel="requests at a time", ylabel="tokens a second", ylim=(0, 1.16 * max(row[2] for row in rows)))
    axes.set_title("Decoding gpt-oss-120b on one H200", loc="left", fontsize=10.5)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100, bbox_inches="tight", metadata={"Description": shown(rows)})


if __name__ == "__main__":
    draw(gains((DOCS / "speed.md").read_text()), DOCS / "gains.png")
