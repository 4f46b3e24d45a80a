"""JSON documents that people read and compare: a row a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def text(document: Mapping[str, Any], rows: str) -> str:
    """`document` as JSON, each item of its list `rows`, which comes last, on a line of its own."""
    head = json.dumps({name: value for name, value in document.items() if name != rows}, indent=1)
    lines = ",\n  ".join(json.dumps(row) for row in document[rows])
    return f'{head[:-2]},\n "{rows}": [\n  {lines}\n ]\n}}\n'
