"""`jitmx cache show`: one entry in full."""

from __future__ import annotations

import datetime

import click

from jitmx.arch import Arch
from jitmx.cache import files, layout, store
from jitmx.cli import output
from jitmx.cli.cache.entries import select
from jitmx.cli.options import arch_option, json_option


@click.command(
    "show",
    short_help="One entry in full, with --sass its machine code.",
    epilog="""\b
Examples:
  jitmx cache show quantize.quantize --arch sm_121
  jitmx cache show 3f2a --sass | grep LDG
  jitmx cache show 3f2a --json | jq .record.inputs.headers

\b
Exit codes: 1 where the machine code is damaged or gone (`jitmx cache verify --repair` tidies up).
""",
)
@click.argument("name_or_key")
@arch_option("Only entries for this target.")
@click.option("--sass", is_flag=True, help="Print the machine code, disassembled.")
@json_option
def command(name_or_key: str, targets_asked: tuple[Arch, ...], sass: bool, as_json: bool) -> None:
    """Print the record, resource use, files and, with --sass, the machine code of NAME_OR_KEY."""
    cache = store.current()
    record = select(cache, name_or_key, targets_asked)
    entry = cache.lookup(record.key)
    root = entry.root if entry else None
    image_path = layout.object_(root, record.outputs["object"]) if root and files.is_directory(root) else None
    source_path = cache.source_path(record.key)
    lines: list[str] | None = None
    if sass and entry is not None:
        from jitmx.toolchain import cubin

        lines = cubin.sass(entry.image)
    if as_json:
        paths = {"object_path": image_path and str(image_path), "source_path": source_path and str(source_path)}
        output.emit({"record": record.as_dict(), **paths, **({"sass": lines} if sass else {})})
    else:
        inputs, outputs = record.inputs, record.outputs
        dated = datetime.datetime.fromtimestamp(record.created).astimezone().isoformat(" ", "seconds")
        created = dated if record.created else "for a bundle (which tells no date)"
        within = f"within the bundle {root}" if root and image_path is None else "damaged or gone"
        rows = (
            ("name", record.name),
            ("target", record.arch),
            ("key", record.key),
            ("knobs", " ".join(f"{name}={output.knob(value)}" for name, value in record.knobs.items())),
            (
                "resources",
                f"{outputs['registers']} registers and {outputs['spill_bytes']} B spilled a thread, "
                f"{outputs['shared_bytes']} B of static shared memory a block",
            ),
            ("contract", "; ".join(outputs["breaches"]) or "met"),
            ("object", f"{image_path or within} ({output.size(outputs['size'])})"),
            ("source", source_path or (within if cache.source(inputs["source_digest"]) else "not kept")),
            ("headers", ", ".join(sorted(inputs["headers"])) or "none"),
            ("options", " ".join(inputs["options"])),
            ("compiler", f"NVRTC {inputs['nvrtc']} ({inputs['nvrtc_digest'][:12]}), {outputs['compile_ms']:.0f} ms"),
            ("created", f"{created} by jitmx {record.jitmx}"),
        )
        for name, value in rows:
            output.say(f"{name:<10} {value}")
        for line in lines or ():
            output.say(line)
    if entry is None:
        raise click.exceptions.Exit(1)
