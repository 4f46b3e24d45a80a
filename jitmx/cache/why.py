"""Why a kernel in the cache is what it is: the named inputs in which it differs from its nearest predecessor."""

from __future__ import annotations

import difflib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jitmx.cache.manifest import Inputs, Record

SourceOf = Callable[[str], "str | None"]
# What the present templates render for a subject; None where they no longer do.
Render = Callable[["Subject"], "str | None"]


@dataclass(frozen=True)
class Subject:
    """What is compared: a record, or what would be compiled now; `kernel` is "" where it is not told."""

    knobs: Mapping[str, Any]
    inputs: Inputs
    kernel: str = ""

    @classmethod
    def of(cls, record: Record) -> Subject:
        """What `record` was made from."""
        return cls(record.knobs, record.inputs, record.kernel)


def predecessor(record: Record, records: Iterable[Record]) -> Record | None:
    """The entry that `record` most likely replaced.

    Of the same family and kernel: first those compiled before it, then of the same target, then with the fewest knobs
    different, then the latest. None where no other entry of the kernel is known.
    """

    def distance(other: Record) -> tuple[bool, bool, int, float, str]:
        later = other.created > record.created
        unlike = len(_knobs(record.knobs, other.knobs))
        return later, other.arch != record.arch, unlike, abs(record.created - other.created), other.key

    kernel = (record.family, record.kernel)
    kin = [other for other in records if (other.family, other.kernel) == kernel and other.key != record.key]
    return min(kin, key=distance, default=None)


def changes(old: Subject, new: Subject, source_of: SourceOf | None = None, render: Render | None = None) -> list[str]:
    """Each named input in which `new` differs from `old`, such as "knob stages 3 → 4" or "NVRTC 13.0 → 13.5".

    Args:
        source_of: the rendered source with a digest, where it is kept; with it, a change of source is counted in lines.
        render: with it, a change of the template is told from what other knobs or another target make of it.
    """
    before, after = old.inputs, new.inputs
    knobs = _knobs(old.knobs, new.knobs)
    found = [*knobs]
    if before["arch"] != after["arch"]:
        found.append(f"target {before['arch']} → {after['arch']}")
    if before["source_digest"] != after["source_digest"]:
        # With other knobs or another target the source differs anyway: whether more of it does has to be looked at.
        if not found:
            found.append(_source(before["source_digest"], after["source_digest"], source_of))
        elif render:
            found += _template(old, new, source_of, render)
    found += _headers(before["headers"], after["headers"])
    skipped = ("-arch=", "--gpu-architecture=") if before["arch"] != after["arch"] else ()
    found += _options(
        [option for option in before["options"] if not option.startswith(skipped or "\0")],
        [option for option in after["options"] if not option.startswith(skipped or "\0")],
    )
    if before["nvrtc"] != after["nvrtc"]:
        found.append(f"NVRTC {before['nvrtc']} → {after['nvrtc']}")
    elif before["nvrtc_digest"] != after["nvrtc_digest"]:
        found.append(f"NVRTC {after['nvrtc']} is another build of that release")
    if before["schema"] != after["schema"]:
        found.append(f"key schema {before['schema']} → {after['schema']}")
    return found


def explain(
    record: Record,
    records: Iterable[Record],
    *,
    present: Subject | None = None,
    sound: bool = True,
    source_of: SourceOf | None = None,
    render: Render | None = None,
) -> list[str]:
    """Why `record` was compiled, in sentences.

    Args:
        records: the entries among which its predecessor is looked for.
        present: what the same variant would be compiled from now; with it, the last sentence says whether the entry is
            current, and if not, why.
        sound: whether a look-up finds its machine code.
        source_of, render: see `changes`.
    """
    said = [
        f"{record.name} for {record.arch} (key {record.key[:12]}) was compiled {_when(record.created)} with NVRTC "
        f"{record.inputs['nvrtc']}."
    ]
    nearest = predecessor(record, records)
    if nearest is None:
        said.append(f"It is the only entry of {record.family}.{record.kernel}: there is nothing to compare it with.")
    else:
        differing = changes(Subject.of(nearest), Subject.of(record), source_of, render)
        order = "nearest predecessor" if nearest.created <= record.created else "nearest other entry"
        said.append(
            f"Its {order} is {nearest.name} for {nearest.arch} (key {nearest.key[:12]}, compiled "
            f"{_when(nearest.created)}); what changed: {'; '.join(differing) or 'no named input'}."
        )
    if present is not None:
        stale = changes(Subject.of(record), present, source_of)
        said.append(
            f"It is stale, and its next use compiles it again: {'; '.join(stale)}."
            if stale
            else "It is current: a look-up now finds it."
            if sound
            else "Its machine code is missing or damaged, and its next use compiles it again."
        )
    return said


def _when(created: float) -> str:
    if not created:
        return "for a bundle (which tells no date)"
    return time.strftime("on %Y-%m-%d at %H:%M:%S", time.localtime(created))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _knobs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found = []
    for name in dict.fromkeys((*old, *new)):
        if name not in old:
            found.append(f"knob {name} added ({_text(new[name])})")
        elif name not in new:
            found.append(f"knob {name} removed (was {_text(old[name])})")
        elif old[name] != new[name]:
            found.append(f"knob {name} {_text(old[name])} → {_text(new[name])}")
    return found


def _headers(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    fate = {(False, True): "added", (True, False): "no longer included", (True, True): "changed"}
    return [f"header {name} {fate[name in old, name in new]}" for name in names]


def _options(old: list[str], new: list[str]) -> list[str]:
    gone = [option for option in old if option not in new]
    come = [option for option in new if option not in old]
    found = []
    for option in gone:
        name, equals, value = option.partition("=")
        other = next((candidate for candidate in come if equals and candidate.startswith(f"{name}=")), None)
        if other is None:
            found.append(f"option {option} removed")
        else:
            come.remove(other)
            found.append(f"option {name} {value} → {other.partition('=')[2]}")
    found += [f"option {option} added" for option in come]
    if not found and old != new:
        found.append(f"options in another order: {' '.join(new)}")
    return found


def _template(old: Subject, new: Subject, source_of: SourceOf | None, render: Render) -> list[str]:
    """Whether the template of two subjects with other knobs or targets changed between them, in words if so."""
    digests = old.inputs["source_digest"], new.inputs["source_digest"]
    rendered = render(old), render(new)
    if None not in rendered:
        is_present = [
            hashlib.sha256(str(text).encode()).hexdigest() == digest
            for text, digest in zip(rendered, digests, strict=True)
        ]
        if all(is_present):
            return []
        if any(is_present):
            return ["template source changed"]
        kept = [source_of(digest) if source_of else None for digest in digests]
        # Of templates that are no more: the same lines differ as between what the present one makes of the knobs.
        if None not in kept and _differing(*map(str, kept)) == _differing(*map(str, rendered)):
            return []
    return ["whether the template source changed too is not known"]


def _differing(old: str, new: str) -> tuple[Counter[str], Counter[str]]:
    """Lines that are only in the one text, and only in the other."""
    was, now = Counter(old.splitlines()), Counter(new.splitlines())
    return was - now, now - was


def _source(old: str, new: str, source_of: SourceOf | None) -> str:
    before, after = (source_of(old), source_of(new)) if source_of else (None, None)
    if before is None or after is None:
        return "template source changed"
    was, now = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, was, now, autojunk=False)
    blocks = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    removed = sum(block[2] - block[1] for block in blocks)
    added = sum(block[4] - block[3] for block in blocks)
    if not blocks:
        return "template source changed in its line ends"
    return f"template source changed ({added} lines added, {removed} removed, the first at line {blocks[0][3] + 1})"
