"""`jitmx cache why`: what changed since an entry's nearest predecessor, and whether it is still current."""

from __future__ import annotations

import click

from jitmx.arch import Arch
from jitmx.cache import store, why
from jitmx.cache.manifest import Record
from jitmx.cli import output
from jitmx.cli.cache.entries import select
from jitmx.cli.options import arch_option, json_option
from jitmx.errors import JitmxError


def _render(subject: why.Subject) -> str | None:
    from jitmx import audit

    return audit.render_again(subject)


def _present(record: Record) -> tuple[why.Subject | None, str | None]:
    """What the variant of `record` would be compiled from now, or why it would not be."""
    from jitmx import audit

    variant = audit.variant_of(record)
    if variant is None:
        return None, f"it has no kernel {record.family}.{record.kernel} with these knobs for {record.arch}"
    try:
        return audit.subject(variant), None
    except JitmxError as error:
        return None, str(error)


@click.command(
    "why",
    short_help="What changed since a kernel was last compiled.",
    epilog="""\b
Examples:
  jitmx cache why quantize.quantize --arch sm_121
  jitmx cache why 3f2a --json | jq -r '.changed[]'
""",
)
@click.argument("name_or_key")
@arch_option("Only entries for this target.")
@json_option
def command(name_or_key: str, targets_asked: tuple[Arch, ...], as_json: bool) -> None:
    """Say why NAME_OR_KEY was compiled: how its inputs differ from those of its nearest predecessor.

    The predecessor is the entry of the same kernel with the nearest knobs. The last sentence says whether the entry is
    current, that is, whether a call would find it now.
    """
    cache = store.current()
    record = select(cache, name_or_key, targets_asked)
    records = list(cache.records())
    now, obstacle = _present(record)
    sound = cache.holds(record.key)
    if not as_json:
        said = why.explain(record, records, present=now, sound=sound, source_of=cache.source, render=_render)
        for sentence in said:
            output.say(sentence)
        if obstacle is not None:
            output.say(f"This jitmx does not compile it any more: {obstacle}.")
        return
    nearest = why.predecessor(record, records)
    here = why.Subject.of(record)
    output.emit(
        {
            "name": record.name,
            "arch": record.arch,
            "key": record.key,
            "predecessor": nearest and nearest.key,
            "changed": [] if nearest is None else why.changes(why.Subject.of(nearest), here, cache.source, _render),
            "current": sound and now is not None and not why.changes(here, now, cache.source),
            "changed_since": [] if now is None else why.changes(here, now, cache.source),
            "sound": sound,
            "obstacle": obstacle,
        }
    )
