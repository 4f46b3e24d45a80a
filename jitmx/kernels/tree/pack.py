"""`tree.pack`: masks of a byte for each pair of nodes to the bits that attention takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jitmx.kernels.tree.problem import Array, exact, spec, words_of
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

PACK = spec(
    "pack",
    Arguments(
        "PackArguments",
        reads("mask", "bytes, of each request nodes x nodes, 0 or not", "unsigned char"),
        reads("starts", "[batch + 1], rows before each request and in all; 0: as many each", "int"),
        writes("packed", "[rows, words]", "unsigned int"),
        number("bytes", "unsigned long long", "of all masks"),
        number("rows", "unsigned int", "of all requests, and rows of none behind them, which become 0"),
        number("nodes", "unsigned int", "of each request where there are no starts"),
        number("words", "unsigned int", "of 32 bits a row, 1 or 2"),
    ),
    threads=128,
    require=(r"\bVOTE",),
)


def packed(mask: Array, words: int) -> Array:
    """Rows of a mask [..., nodes, nodes] as words of 32 bits, [..., nodes, words]."""
    bits = np.zeros((*mask.shape[:-1], 32 * words), bool)
    bits[..., : mask.shape[-1]] = mask
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint32)


def _case(
    counts: Sequence[int], words: int, extra: int, seed: int, *, even: bool = False, cut: tuple[int, int] = (0, 0),
    negative: int = 0,
) -> Case:  # fmt: skip
    """Requests of so many nodes each.

    Args:
        extra: rows that belong to none.
        cut: rows, and bytes, that are not there.
        negative: rows before the first one that the starts speak of.
    """
    generator = np.random.default_rng(seed)
    masks = [generator.random((count, count)) < 0.4 for count in counts]
    rows = [packed(mask, words) for mask in masks] + [np.zeros((extra, words), np.uint32)]
    flat = np.concatenate([mask.ravel() for mask in masks]).astype(np.uint8)
    flat[flat > 0] = generator.integers(1, 256, int((flat > 0).sum()))  # any byte but 0 is true
    if negative:
        flat = np.insert(flat, counts[0] ** 2, np.zeros((counts[0] + negative) ** 2 - counts[0] ** 2, np.uint8))
    if cut[1]:
        flat = flat[: -cut[1]]
        bits = np.append(flat > 0, np.zeros(cut[1], bool))[-(counts[-1] ** 2) :].reshape(counts[-1], counts[-1])
        rows[len(counts) - 1] = packed(bits, words)
    out = np.concatenate(rows)[: sum(counts) + extra - cut[0]]
    outputs, check = exact({"packed": out})
    values: dict[str, Any] = {
        "mask": Buffer(flat), **outputs, "bytes": flat.size, "rows": len(out), "words": words,
        "nodes": counts[0] if even else 0,
    }  # fmt: skip
    if not even:
        values["starts"] = Buffer(np.concatenate([[-negative], np.cumsum(counts)]).astype(np.int32))
    return Case(
        name=f"masks of {', '.join(map(str, counts))} nodes, {words} words",
        launch=Launch(len(counts)),
        values=values,
        check=check,
        gate=0.0,
        sides={
            "no node": 0 in counts,
            "a whole word": 32 in counts,
            "one bit of the second word": 33 in counts,
            "all bits": 64 in counts,
            "rows of no request": extra > 0,
            "fewer rows than nodes": cut[0] > 0,
            "a mask that ends early": cut[1] > 0,
        },
        fixed=("bytes", "rows", "nodes", "words"),
    )


def cases(variant: Variant) -> Iterator[Case]:
    """Masks of as many nodes each, and of others; the last of very many."""
    yield _case((7,) * 3, 1, 0, 0, even=True)
    yield _case((64,) * 2, 2, 0, 1, even=True)
    yield _case((33, 0, 1, 64, 5, 32), 2, 300, 2)
    yield _case((3, 32, 0, *(k % 5 for k in range(40)), 9), 1, 2, 3)
    yield _case((0, 0), 2, 600, 4)
    yield _case((5, 40), 2, 0, 5, cut=(6, 40 * 20 + 3))
    yield _case((9, 9), 1, 0, 6, even=True, cut=(2, 30))
    yield _case((4, 5), 1, 0, 7, negative=3)
    yield _far()


def _far() -> Case:
    """The last of masks of 64 nodes that are over 2^32 bytes."""
    batch, nodes = (1 << 20) + 8, 64
    mask = np.random.default_rng(6).random((1, nodes, nodes)) < 0.5
    outputs, check = exact({"packed": packed(mask, words_of(nodes))})
    values: dict[str, Any] = {"mask": Buffer(mask.astype(np.uint8)), **outputs}
    for name, item in values.items():
        before = (batch - 1) * item.data.nbytes
        values[name] = item.spread([before], before + item.data.nbytes)
    values |= {"bytes": batch * nodes * nodes, "rows": batch * nodes, "nodes": nodes, "words": 2}
    return Case(
        name=f"the last of {batch} masks", launch=Launch(batch), values=values, check=check, gate=0.0,
        blocks=(batch - 1,), fixed=("bytes", "rows", "nodes", "words"),
    )  # fmt: skip
