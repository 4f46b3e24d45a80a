"""Logits of level 2's float32 reference in a file: made where there is room for it, compared with on another machine.

The file knows the prompts and, tensor by tensor, the checkpoint that it was made of; it serves for no other.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.protocol import engines
from scripts.protocol.engines import Place
from scripts.protocol.report import ProtocolError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Table = npt.NDArray[np.float32]


def write(file: Path, place: Place, prompts: list[list[int]], device: str) -> dict[str, Any]:
    """Run transformers in float32 and keep the logits after each prompt; gives back what the file is about.

    Args:
        device: where it runs.

    Raises:
        ProtocolError: it failed or ran out of time.
    """
    import numpy as np

    table = make(place, prompts, device)
    about = _about(place.model, prompts)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        np.savez_compressed(stream, logits=table, about=np.array(json.dumps(about)))
    return about | {"shape": list(table.shape)}


def make(place: Place, prompts: list[list[int]], device: str) -> Table:
    """Logits [prompts, vocab] of transformers in float32 after each prompt.

    Raises:
        ProtocolError: as `write`.
    """
    import numpy as np

    into = place.out / "transformers.logits.npy"
    groups = [1] * len(prompts)
    engines.reference(place, [{"task": "logits", "prompts": prompts, "groups": groups, "into": str(into)}], device)
    table: Table = np.load(into)
    return table


def read(file: Path, model: Path, prompts: list[list[int]]) -> Table:
    """Logits [prompts, vocab] that `write` kept.

    Raises:
        ProtocolError: no such file, or one of another checkpoint or other prompts.
    """
    import numpy as np

    try:
        with np.load(file) as kept:
            table: Table = kept["logits"]
            about = json.loads(str(kept["about"]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ProtocolError(f"{file} holds no reference ({error}); make one with scripts/make_reference.sh") from None
    wanted = _about(model, prompts)
    other = [name for name in wanted if about.get(name) != wanted[name]]
    if other:
        raise ProtocolError(
            f"{file} was made of another {' and other '.join(other)}; make one of {model.name}, this --seed and these "
            "--long-tokens with scripts/make_reference.sh"
        )
    return table


def _about(model: Path, prompts: list[list[int]]) -> dict[str, str]:
    from scripts.protocol import checkpoint

    return {"checkpoint": checkpoint.digest(model), "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()}
