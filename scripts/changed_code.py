"""Which kernels' code a change alters: PTX of every default variant, before and after.

    python scripts/changed_code.py before.json             # in the tree of before: writes the digests
    python scripts/changed_code.py before.json --compare   # in the tree of after: lists the variants of other PTX

`--only PATTERN` takes the variants whose target and name a regular expression matches, `sm_90a moe` for example.
`--sass` goes by machine code: where PTX differs, it says whether ptxas makes the same of both.

Equal PTX is equal machine code, so that a variant that is not listed is as fast as it was. Names that the compiler
gives to functions, variables, labels and virtual registers do not count.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jitmx import arch, kernels, machine
from jitmx.dispatch.choose import default_variants
from jitmx.errors import JitmxError
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import cubin, nvrtc

TARGETS = "sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a"
_COMMENT = re.compile(r"//.*$", re.MULTILINE)
_NAME = re.compile(r"\b_Z\w+|(?<![\w.])\$L_\w+|%(?:rd|rs|r|fd|f|p|h|hh)\d+\b")
_REGISTERS = re.compile(r"^\s*\.reg .*$", re.MULTILINE)
_CONSTANT = re.compile(r"^\.global .*?\b(_Z\w+).*;\n", re.MULTILINE)
_BLANKS = re.compile(r"[ \t]+|(?<=\{) | (?=\})")


def code(ptx: str) -> str:
    """PTX without comments, blanks, constants that nothing reads and numbers of registers; its names as they come."""
    ptx = _REGISTERS.sub("", _COMMENT.sub("", ptx))
    mentions = Counter(_NAME.findall(ptx))
    ptx = _CONSTANT.sub(lambda constant: "" if mentions[constant[1]] == 1 else constant[0], ptx)
    numbers: dict[str, str] = {}
    ptx = _NAME.sub(lambda name: numbers.setdefault(name[0], f"name{len(numbers)}"), ptx)
    return "\n".join(line for line in (_BLANKS.sub("", line) for line in ptx.splitlines()) if line)


def digest(variant: Variant, sass: bool) -> str:
    """Of a variant's code; the error where it does not compile."""
    try:
        source, options = render(variant), nvrtc.options(variant.arch)
        if sass:
            text = "\n".join(cubin.sass(nvrtc.compile(source, options).image))
        else:
            text = code(nvrtc.compile_ptx(source, options))
    except JitmxError as error:
        return f"{type(error).__name__}: {error}"
    return hashlib.sha256(text.encode()).hexdigest()


def digests(only: str, sass: bool) -> dict[str, str]:
    """By target and name, of all default variants whose target and name match."""
    variants = [
        variant
        for target in map(arch.parse, TARGETS)
        for family in kernels.families()
        for variant in default_variants(family, target)
        if re.search(only, f"{variant.arch} {variant.name}")
    ]
    with ThreadPoolExecutor(machine.compiles_at_once()) as pool:
        found = pool.map(functools.partial(digest, sass=sass), variants)
        return {f"{variant.arch} {variant.name}": one for variant, one in zip(variants, found, strict=True)}


def main() -> None:
    """Write the digests, or say what differs from those written before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", metavar="PATTERN", default="", help="a regular expression; all variants by default")
    parser.add_argument("--sass", action="store_true", help="machine code in place of PTX; slower")
    asked = parser.parse_args()
    now = digests(asked.only, asked.sass)
    if not asked.compare:
        asked.file.write_text(json.dumps(now, indent=1))
        return
    before = {name: one for name, one in json.loads(asked.file.read_text()).items() if re.search(asked.only, name)}
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            said = "is new" if name not in before else "is gone" if name not in now else "has other code"
            print(f"{name} {said}" + (f": {now[name]}" if " " in now.get(name, "") else ""))
    same = sum(before.get(name) == one for name, one in now.items())
    print(f"{same} of {len(now)} variants have the code of before", file=sys.stderr)


if __name__ == "__main__":
    main()
