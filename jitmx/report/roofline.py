"""A roofline as inline SVG: rates of products over their operations a byte, under what a card's memory and tensor cores
allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from jitmx.quoting import printable

_WIDTH, _HEIGHT = 760, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 16, 48
_SHAPES = ("circle", "square", "diamond", "triangle")
_LEAST = 1e-9  # of what is drawn
_COLOURS = 6  # classes of the page's style


@dataclass(frozen=True)
class Point:
    """A launch of the plot.

    Attributes:
        name: of the launch, for its tooltip.
        family: which points look alike.
        intensity: operations a byte of device memory.
        teraflops: its rate, TFLOP/s.
        measured: whether the time is measured; else it is predicted, and the point is hollow.
    """

    name: str
    family: str
    intensity: float
    teraflops: float
    measured: bool


@dataclass(frozen=True)
class Roof:
    """What a card allows: GB/s of memory and TFLOP/s of its products."""

    card: str
    gbps: float
    teraflops: float

    def at(self, intensity: float) -> float:
        """TFLOP/s at so many operations a byte."""
        return min(self.teraflops, intensity * self.gbps / 1e3)


class _Axis:
    """Powers of ten over a span of pixels."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        logs = [math.log10(value) for value in values if value > 0]
        self.low, self.high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        part = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self._start + part * (self._end - self._start), 1)

    @property
    def ticks(self) -> list[int]:
        """Exponents that are marked."""
        return list(range(self.low, self.high + 1))


def draw(points: Sequence[Point], roof: Roof, number: int = 0) -> Markup:
    """The plot as an SVG element with a title and a description; empty where no point is to be drawn.

    Args:
        number: of the plot on its page, for its ids.
    """
    points = [point for point in points if min(point.intensity, point.teraflops) >= _LEAST]
    if not points:
        return Markup("")
    knee = roof.teraflops * 1e3 / roof.gbps
    intensities = [*(point.intensity for point in points), knee]
    rates = [*(point.teraflops for point in points), roof.teraflops, *(roof.at(point.intensity) for point in points)]
    x = _Axis(intensities, _LEFT, _WIDTH - _RIGHT)
    y = _Axis(rates, _HEIGHT - _BOTTOM, _TOP)
    families = list(dict.fromkeys(point.family for point in points))
    parts = [
        _opening(points, roof, families, number), *_grid(x, y), _roof(x, y, roof), *_marks(x, y, points, families),
        *_legend(families), "</svg>",
    ]  # fmt: skip
    return Markup("\n".join(parts))


def _opening(points: Sequence[Point], roof: Roof, families: Sequence[str], number: int) -> str:
    best = max(points, key=lambda point: point.teraflops / roof.at(point.intensity))
    said = (
        f"{len(points)} launches of {', '.join(families)}. The roof is {roof.gbps:.0f} GB/s up to "
        f"{roof.teraflops * 1e3 / roof.gbps:.0f} operations a byte, and {roof.teraflops:.0f} TFLOP/s beyond. Nearest "
        f"to it is {best.name} at {best.teraflops / roof.at(best.intensity):.0%}. The table of kernels has the numbers."
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="roofline-title-{number} '
        f'roofline-text-{number}" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="roofline-title-{number}">Roofline of {_text(roof.card)}</title>'
        f'<desc id="roofline-text-{number}">{_text(said)}</desc>'
    )


def _grid(x: _Axis, y: _Axis) -> Iterable[str]:
    for tick in x.ticks:
        at = x(10.0**tick)
        yield f'<line class="grid" x1="{at}" y1="{_TOP}" x2="{at}" y2="{_HEIGHT - _BOTTOM}"/>'
        yield f'<text x="{at}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{_power(tick)}</text>'
    for tick in y.ticks:
        at = y(10.0**tick)
        yield f'<line class="grid" x1="{_LEFT}" y1="{at}" x2="{_WIDTH - _RIGHT}" y2="{at}"/>'
        yield f'<text x="{_LEFT - 8}" y="{at + 4}" text-anchor="end">{_power(tick)}</text>'
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    yield f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">operations a byte of device memory</text>'
    half = (_TOP + _HEIGHT - _BOTTOM) / 2
    yield f'<text transform="translate(14 {half}) rotate(-90)" text-anchor="middle">TFLOP/s</text>'


def _power(exponent: int) -> str:
    return f"{10.0**exponent:g}"


def _roof(x: _Axis, y: _Axis, roof: Roof) -> str:
    low, high = 10.0**x.low, 10.0**x.high
    knee = min(max(roof.teraflops * 1e3 / roof.gbps, low), high)
    start = max(low, 10.0**y.low / (roof.gbps / 1e3))  # where the slope enters the plot
    places = sorted({start, max(knee, start), high})
    line = " ".join(f"{x(place)},{y(roof.at(place))}" for place in places)
    return f'<polyline class="roof" points="{line}"/>'


def _marks(x: _Axis, y: _Axis, points: Sequence[Point], families: Sequence[str]) -> Iterable[str]:
    for point in points:
        at = families.index(point.family)
        said = f"{point.name}: {point.teraflops:.3g} TFLOP/s, {'measured' if point.measured else 'predicted'}"
        look = f"family{at % _COLOURS} {'measured' if point.measured else 'predicted'}"
        mark = _shape(_SHAPES[at % len(_SHAPES)], x(point.intensity), y(point.teraflops))
        yield f'<g class="{look}"><title>{_text(said)}</title>{mark}</g>'


def _shape(kind: str, x: float, y: float) -> str:
    """A mark of the same size whatever its kind."""
    if kind == "circle":
        return f'<circle cx="{x}" cy="{y}" r="5"/>'
    if kind == "square":
        return f'<rect x="{x - 4.5}" y="{y - 4.5}" width="9" height="9"/>'
    corners = {"diamond": ((0, -6), (6, 0), (0, 6), (-6, 0)), "triangle": ((0, -6), (6, 5), (-6, 5))}[kind]
    return f'<polygon points="{" ".join(f"{x + dx},{y + dy}" for dx, dy in corners)}"/>'


def _legend(families: Sequence[str]) -> Iterable[str]:
    for place, family in enumerate(families):
        at = _TOP + 16 + 18 * place
        mark = _shape(_SHAPES[place % len(_SHAPES)], _LEFT + 14, at - 4)
        yield f'<g class="family{place % _COLOURS} measured">{mark}</g>'
        yield f'<text x="{_LEFT + 26}" y="{at}">{_text(family)}</text>'


def _text(text: str) -> Markup:
    """Foreign text as text, without characters that steer what is around it."""
    return escape(printable(text))
