"""Level 6 by its other name: the matrix of layers, activation and tile.

python scripts/benchmark_matrix.py --model FOLDER --sets 'moe;all' --activations bf16,mxfp8
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.protocol.__main__ import level6, main

if __name__ == "__main__":
    main([level6.name or "level6", *sys.argv[1:]], prog_name="benchmark_matrix.py")
