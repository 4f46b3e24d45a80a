"""Which kernels' code a change alters: PTX of every default variant, before and after.

    python scripts/changed_code.py before.json             # in the tree of before: writes the digests
    python scripts/changed_code.py before.json --compare   # in the tree of after: lists the variants of other PTX

Equal PTX is equal machine code, so that a variant that is not listed is as fast as it was. Names that the compiler
gives to functions, variables, labels and virtual registers do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jitmx import arch, kernels, machine
from jitmx.dispatch.choose import default_variants
from jitmx.errors import JitmxError
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import nvrtc

TARGETS = "sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a"
_COMMENT = re.compile(r"^//.*$", re.MULTILINE)
_NAME = re.compile(r"\b_Z\w+|(?<![\w.])\$L_\w+|%(?:rd|rs|r|fd|f|p|h|hh)\d+\b")
_REGISTERS = re.compile(r"^\s*\.reg .*$", re.MULTILINE)


def code(ptx: str) -> str:
    """PTX without comments, its names numbered as they come, and without what it says of its registers' number."""
    numbers: dict[str, str] = {}
    plain = _REGISTERS.sub("", _COMMENT.sub("", ptx))
    return _NAME.sub(lambda name: numbers.setdefault(name[0], f"name{len(numbers)}"), plain)


def digest(variant: Variant) -> str:
    """Of a variant's code; the error where it does not compile."""
    try:
        ptx = nvrtc.compile_ptx(render(variant), nvrtc.options(variant.arch))
    except JitmxError as error:
        return f"{type(error).__name__}: {error}"
    return hashlib.sha256(code(ptx).encode()).hexdigest()


def digests() -> dict[str, str]:
    """By target and name, of all default variants."""
    variants = [
        variant
        for target in map(arch.parse, TARGETS)
        for family in kernels.families()
        for variant in default_variants(family, target)
    ]
    with ThreadPoolExecutor(machine.compiles_at_once()) as pool:
        found = pool.map(digest, variants)
        return {f"{variant.arch} {variant.name}": one for variant, one in zip(variants, found, strict=True)}


def main() -> None:
    """Write the digests, or say what differs from those written before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    asked = parser.parse_args()
    now = digests()
    if not asked.compare:
        asked.file.write_text(json.dumps(now, indent=1))
        return
    before = json.loads(asked.file.read_text())
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            said = "is new" if name not in before else "is gone" if name not in now else "has other code"
            print(f"{name} {said}" + (f": {now[name]}" if " " in now.get(name, "") else ""))
    same = sum(before.get(name) == one for name, one in now.items())
    print(f"{same} of {len(now)} variants have the PTX of before", file=sys.stderr)


if __name__ == "__main__":
    main()
