"""Add what GPU tests showed to the shipped ledger.

    TEST_EVIDENCE=seen.json pytest tests/gpu && python scripts/record_evidence.py seen.json

Only default variants are kept, those that `jitmx variants` lists; evidence of code that has since changed goes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jitmx import arch, kernels, ledger, resources
from jitmx.dispatch.choose import default_variants
from jitmx.registry.render import render


def main() -> None:
    shipped = resources.directory("tactics") / "ledger.json"
    entries = [*ledger.load(shipped).entries, *(e for path in sys.argv[1:] for e in ledger.load(Path(path)).entries)]
    current = {
        (ledger.digest(render(variant)), target.name)
        for target in arch.SUPPORTED.values()
        for family in kernels.families()
        for variant in default_variants(family, target)
    }
    kept = [entry for entry in entries if (entry.source_digest, entry.arch) in current]
    ledger.save(kept, shipped)
    print(f"{len(kept)} of {len(entries)} entries are of current default variants; {shipped.name} holds them")


if __name__ == "__main__":
    main()
