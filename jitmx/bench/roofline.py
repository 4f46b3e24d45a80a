"""Plots of `jitmx bench`: what is achieved over the rows of X, under the roof of the same run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitmx.errors import KnobError

if TYPE_CHECKING:
    from jitmx.bench.benchmark import Ceilings

_MARKERS = "osD^vP*X"


def require_matplotlib() -> None:
    """Raise KnobError where there is no matplotlib, before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise KnobError("--plot needs matplotlib", "install it with: pip install 'jitmx[bench]'")


def lines(rows: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Microseconds over rows of X for each library that was measured, of rows of one shape."""
    found: dict[str, list[tuple[int, float]]] = {"jitmx": [(row["m"], row["us"]) for row in rows]}
    found["cuBLAS bf16"] = [(row["m"], row["cublas_us"]) for row in rows if "cublas_us" in row]
    for name in rows[0]["peers"]:
        found[name] = [(row["m"], us) for row in rows if (us := row["peers"][name]["us"]) is not None]
    return {name: points for name, points in found.items() if points}


def draw(rows: list[dict[str, Any]], limits: Ceilings, path: Path, what: str, counted: str) -> None:
    """Write a PNG: a column a shape, bandwidth above and rate below, both logarithmic.

    Args:
        what: what was measured, for the title.
        counted: what bandwidth counts, for the axis.

    Bandwidth counts the bytes of jitmx's call (packed weight, X and Y), also for libraries that read more: a line is as
    high as its library is fast.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((row["name"], row["n"], row["k"]) for row in rows))
    # A library looks the same in every panel, and some of them lack a library.
    marks = {library: (marker, f"C{i}") for i, (library, marker) in enumerate(zip(lines(rows), _MARKERS, strict=False))}
    figure, axes = pyplot.subplots(
        2, len(shapes), figsize=(4.2 * len(shapes) + 1, 7), layout="constrained", squeeze=False, sharex="col"
    )
    for column, (name, n, k) in enumerate(shapes):
        mine = [row for row in rows if (row["name"], row["n"], row["k"]) == (name, n, k)]
        bytes_of = {row["m"]: row["bytes"] for row in mine}
        flops_of = {row["m"]: row["flops"] for row in mine}
        counts = sorted(bytes_of)
        # Seconds that neither memory nor tensor cores could beat.
        floor = {m: max(bytes_of[m] / limits.read, flops_of[m] / limits.matmul) for m in counts}
        for axis, amount in ((axes[0][column], bytes_of), (axes[1][column], flops_of)):
            axis.loglog(counts, [amount[m] / floor[m] / 1e12 for m in counts], color="black", linestyle="--",
                        label="roofline of this run")  # fmt: skip
            for library, points in lines(mine).items():
                marker, color = marks[library]
                axis.loglog([m for m, _ in points], [amount[m] / us / 1e6 for m, us in points], marker=marker,
                            color=color, label=library)  # fmt: skip
            axis.grid(which="both", alpha=0.2)
        axes[0][column].set(title=(f"{name} [{n}, {k}]" if n else name).strip(), ylabel=counted)
        axes[1][column].set(xlabel="rows of X", ylabel="TFLOP/s")
        axes[1][column].set_xscale("log", base=2)
        axes[1][column].set_xticks(counts, [str(m) for m in counts])
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"jitmx {what} on {limits.card}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
