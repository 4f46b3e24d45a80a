"""Prompts of many tokens whose logits tell whether far tokens are attended to.

A needle, a few tokens over and over, takes a fifth of a prompt, at the start of one of its quarters, and ends the
prompt. Weights are random, so no answer is right: logits after the prompt are held to a reference as those of short
prompts are. Every prompt has a twin with another needle in the same place. How far the logits of the two are apart is
what the place counts for; where that is little beside what engines may be off, the comparison cannot tell, and fails.
"""

from __future__ import annotations

from typing import Any

from jitmx.registry.case import relative_l2
from scripts.protocol import worker
from scripts.protocol.report import ProtocolError, Report

# Tokens of a prompt where nothing is said.
TOKENS = 20000
# A needle's place counts for so many times what jitmx's logits may be off at least. A fault reaches the two prompts of
# one place in four, so half of what it does to them is left over all prompts.
SEEN = 4.0
# Whole blocks of the cache are known; one token is left then.
_BLOCK = 16
_NEEDLE, _SHARE, _PLACES = 16, 5, 4


def prompts(vocab: int, tokens: int, seed: int) -> list[list[int]]:
    """Prompts of about `tokens` tokens, each before its twin; none for 0.

    Raises:
        ProtocolError: too few tokens.
    """
    if not tokens:
        return []
    least = _NEEDLE * _SHARE * _PLACES
    if tokens < least:
        raise ProtocolError(f"{tokens} tokens hold no needle; take {least} or more, or 0 for no long prompt")
    length = tokens // _BLOCK * _BLOCK + 1
    one, other, *hay = worker.random_prompts(vocab, [_NEEDLE] * 2 + [length] * _PLACES, seed)
    span, found = length // _SHARE, []
    for place, prompt in enumerate(hay):
        start = place * length // _PLACES
        for needle in (one, other):
            lies = (needle * span)[:span]
            found.append([*prompt[:start], *lies, *prompt[start + span : -_NEEDLE], *one])
    return found


def judge(report: Report, what: str, table: Any, bound: float) -> None:
    """Check that a needle's place counts for enough that who does not see it is found.

    Args:
        what: a name for these logits.
        table: logits [prompts, vocabulary] after `prompts`, of the reference or of a stock backend.
        bound: relative L2 that jitmx's may be off.
    """
    moved = [relative_l2(other, one) for one, other in zip(table[::2], table[1::2], strict=True)]
    report.results.setdefault("needle moves", {})[what] = moved
    seen = f"{what}: another needle moves them by {min(moved):.4g} at least, wanted over {SEEN} times {bound:.4g}"
    found = min(moved) > SEEN * bound
    report.check(
        "far tokens count", found, seen + ("" if found else "; so this prompt cannot tell: take another --seed")
    )
