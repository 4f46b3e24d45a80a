"""`jitmx variants`: the default kernels of a target, their knobs, resource use and evidence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from jitmx.cli import output, targets
from jitmx.cli.options import arch_option, family_option, json_option

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.cache.manifest import Record
    from jitmx.cache.store import Store
    from jitmx.ledger import Ledger
    from jitmx.registry.spec import Variant


def row(variant: Variant, records: dict[tuple[str, str], Record], book: Ledger) -> dict[str, Any]:
    """What `jitmx variants --json` says of a variant: knobs, resource use of its entry in the cache, evidence."""
    from jitmx import build, ledger
    from jitmx.registry import key
    from jitmx.registry.render import render

    source, arch = render(variant), str(variant.arch)
    record = records.get((variant.identity, key.digest(source.encode())))
    if record is not None and not build.unchanged(record.inputs["headers"]):
        record = None
    evidence: dict[str, Any] = {"kind": "none"}
    if (entry := book.best(ledger.digest(source), arch)) is not None:
        evidence = {part: getattr(entry, part) for part in ("card", "date", "error", "note")}
        evidence = {"kind": entry.evidence, **evidence}
    elif record is not None and not record.outputs["breaches"]:
        evidence = {"kind": "compiled"}
    return {
        "name": variant.name,
        "family": variant.spec.family,
        "arch": arch,
        "knobs": variant.knobs.as_dict(),
        "key": None if record is None else record.key,
        **targets.resource_use(variant, record),
        "evidence": evidence,
    }


def latest(cache: Store) -> dict[tuple[str, str], Record]:
    """The last record of each variant's identity and source."""
    ordered = sorted(cache.records(), key=lambda record: record.created)
    return {(record.identity, record.inputs["source_digest"]): record for record in ordered}


def evidence_words(evidence: dict[str, Any]) -> str:
    """Evidence in a line."""
    details = [evidence.get("card"), evidence.get("date")]
    if evidence.get("error") is not None:
        details.append(f"error {evidence['error']:.2g}")
    said = ", ".join(filter(None, details))
    return f"{evidence['kind']} ({said})" if said else str(evidence["kind"])


@click.command(
    "variants",
    short_help="List kernels with resource use and evidence.",
    epilog="""\b
Examples:
  jitmx variants --arch sm_121
  jitmx variants attention --arch sm_90       the same as --family attention
  jitmx variants --arch sm_90 --family linear
  jitmx variants --arch sm_90 --json | jq -r '.variants[] | select(.evidence.kind == "hardware") | .name'

\b
Evidence: hardware (ran on the card named and was compared), simulated, compiled (contract met), none.
It belongs to the exact code: an edited template or header loses it. Registers are those of the cache; – means that
the kernel is not compiled here yet. SHARED is bytes a block, of the smallest problem where it grows with the problem.
""",
)
@click.argument("op", nargs=-1)
@arch_option()
@family_option
@json_option
def command(op: tuple[str, ...], targets_asked: tuple[Arch, ...], family_names: tuple[str, ...], as_json: bool) -> None:
    """List the default kernels of a target with their knobs, resource use and evidence.

    With OP, those of these families only.
    """
    from jitmx import ledger
    from jitmx.cache import store

    family_names = tuple(dict.fromkeys((*op, *family_names)))
    arches = targets.resolve(targets_asked)
    book = ledger.known()
    records = latest(store.current())
    rows = [row(variant, records, book) for variant in targets.default_variants(arches, family_names)]
    if as_json:
        output.emit({"arch": ",".join(map(str, arches)), "variants": rows})
        return
    output.table(
        ("NAME", "ARCH", "REGISTERS", "SPILLED", "SHARED", "EVIDENCE", "KNOBS"),
        [
            (
                one["name"],
                one["arch"],
                one["registers"],
                one["spill_bytes"],
                one["shared_bytes"],
                evidence_words(one["evidence"]),
                " ".join(f"{name}={output.knob(value)}" for name, value in one["knobs"].items()),
            )
            for one in rows
        ],
        right=("REGISTERS", "SPILLED", "SHARED"),
    )
