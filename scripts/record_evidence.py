"""Add what tests showed to the ledgers: of default variants to the shipped one, of others to that of the tests.

    TEST_EVIDENCE=seen.json pytest tests/gpu && python scripts/record_evidence.py seen.json
    TEST_EVIDENCE=seen.json pytest tests/sim tests/kernels -n auto && python scripts/record_evidence.py seen.json.*

Default variants are those that `jitmx variants` lists; evidence of code that has since changed goes. What a card showed
stays where the source has changed and its machine code has not, as NVRTC and ptxas make it here. The tests' ledger
has what the simulator showed of variants that only tests take, of which variants the machine code keeps its contract,
which cases of a test's own pass and which planted faults are caught, so that they need be neither simulated nor
compiled again; of each the latest.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jitmx import arch, kernels, ledger, machine, resources
from jitmx.dispatch.choose import default_variants
from jitmx.ledger import Entry
from jitmx.registry.render import render
from jitmx.registry.spec import Variant
from jitmx.toolchain import cubin, nvrtc

TESTS = Path(__file__).parents[1] / "tests" / "ledger.json"


def machine_code(variant: Variant) -> str:
    """A digest of the SASS of a variant, and of who made it."""
    image = nvrtc.compile(render(variant), nvrtc.options(variant.arch)).image
    text = "\n".join([nvrtc.identity().version, *cubin.sass(image)])
    return hashlib.sha256(text.encode()).hexdigest()


def carried(entries: Iterable[Entry], current: Mapping[tuple[str, str], Variant]) -> Iterator[Entry]:
    """Entries with what cards showed of code that is still made, under the digests of today's sources.

    Args:
        current: default variants by digest and target.
    """
    entries = list(entries)
    shown = {(entry.kernel, entry.arch) for entry in entries if entry.evidence == "hardware"}
    asked = {key: variant for key, variant in current.items() if (variant.name, variant.arch.name) in shown}
    with ThreadPoolExecutor(machine.compiles_at_once()) as pool:
        codes = dict(zip(asked, pool.map(machine_code, asked.values()), strict=True))
    by_name = {(variant.name, variant.arch.name): key for key, variant in asked.items()}
    for entry in entries:
        key = by_name.get((entry.kernel, entry.arch))
        if entry.evidence != "hardware" or key is None:
            yield entry
        elif key[0] == entry.source_digest or codes[key] == entry.code:
            yield dataclasses.replace(entry, source_digest=key[0], code=codes[key])


def files_of(arguments: Sequence[str] | None) -> list[Path]:
    """The files of evidence that the command line names, all of which are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", metavar="FILE", nargs="*", type=Path, help="a ledger that tests wrote; none: only "
                        "evidence of code that has changed goes")  # fmt: skip
    found: list[Path] = parser.parse_args(arguments).evidence
    if missing := [path for path in found if not path.is_file()]:
        parser.error(f"there is no file {missing[0]}, so nothing is recorded; name those that TEST_EVIDENCE made")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    seen = [entry for path in files_of(arguments) for entry in ledger.load(path).entries]
    shipped = resources.directory("tactics") / "ledger.json"
    current = {
        (ledger.digest(render(variant)), target.name): variant
        for target in arch.SUPPORTED.values()
        for family in kernels.families()
        for variant in default_variants(family, target)
    }
    contracts = [entry for entry in seen if entry.evidence == "compiled"]
    seen = [entry for entry in seen if entry.evidence != "compiled"]
    entries = list(carried([*ledger.load(shipped).entries, *seen], current))
    kept = [entry for entry in entries if (entry.source_digest, entry.arch) in current]
    ledger.save(kept, shipped)
    others = [entry for entry in seen if entry.proof and (entry.source_digest, entry.arch) not in current]
    before = ledger.load(TESTS).entries
    of_tests = {(one.kernel, one.arch, one.evidence, one.note): one for one in (*before, *others, *contracts)}
    ledger.save(of_tests.values(), TESTS)
    print(f"{len(kept)} of {len(entries)} entries are of current default variants; {shipped.name} holds them")
    print(f"{len(of_tests)} are of other variants that tests take, and of contracts")


if __name__ == "__main__":
    main()
