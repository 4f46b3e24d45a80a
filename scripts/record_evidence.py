"""Add what tests showed to the ledgers: of default variants to the shipped one, of others to that of the tests.

    TEST_EVIDENCE=seen.json pytest tests/gpu && python scripts/record_evidence.py seen.json
    TEST_EVIDENCE=seen.json pytest tests/sim tests/kernels -n auto && python scripts/record_evidence.py seen.json.*

Default variants are those that `jitmx variants` lists; evidence of code that has since changed goes. The tests' ledger
has what the simulator showed of variants that only tests take, so that they need not be simulated again; of a variant
the latest.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jitmx import arch, kernels, ledger, resources
from jitmx.dispatch.choose import default_variants
from jitmx.registry.render import render

TESTS = Path(__file__).parents[1] / "tests" / "ledger.json"


def main() -> None:
    shipped = resources.directory("tactics") / "ledger.json"
    seen = [entry for path in sys.argv[1:] for entry in ledger.load(Path(path)).entries]
    entries = [*ledger.load(shipped).entries, *seen]
    current = {
        (ledger.digest(render(variant)), target.name)
        for target in arch.SUPPORTED.values()
        for family in kernels.families()
        for variant in default_variants(family, target)
    }
    kept = [entry for entry in entries if (entry.source_digest, entry.arch) in current]
    ledger.save(kept, shipped)
    others = [entry for entry in seen if entry.proof and (entry.source_digest, entry.arch) not in current]
    of_tests = {(entry.kernel, entry.arch): entry for entry in (*ledger.load(TESTS).entries, *others)}
    ledger.save(of_tests.values(), TESTS)
    print(f"{len(kept)} of {len(entries)} entries are of current default variants; {shipped.name} holds them")
    print(f"{len(of_tests)} are of other variants that tests take")


if __name__ == "__main__":
    main()
