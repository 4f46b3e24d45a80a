"""Write anew what the commands of a document print: each block of ```console that opens with `$ jitmx ...`.

    python scripts/refresh_outputs.py docs/cost-model.md

The commands run in this process, without settings of the environment, and must exit 0.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner

from jitmx.cli import main as jitmx

_BLOCK = re.compile(r"```console\n\$ jitmx ([^\n]*)\n(.*?)```", re.DOTALL)


def printed(words: str) -> str:
    """What `jitmx` prints for these words.

    Raises:
        RuntimeError: it exits with another code than 0.
    """
    done = CliRunner().invoke(jitmx, shlex.split(words), prog_name="jitmx")
    if done.exit_code:
        raise RuntimeError(f"jitmx {words}: exit {done.exit_code}: {done.output}")
    return done.stdout


def refreshed(text: str) -> str:
    """A document's text with blocks as their commands print them now."""
    return _BLOCK.sub(lambda block: f"```console\n$ jitmx {block[1]}\n{printed(block[1])}```", text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", metavar="DOCUMENT", nargs="+", type=Path, help="is written over")
    documents = parser.parse_args(arguments).documents
    if missing := [path for path in documents if not path.is_file()]:
        parser.error(f"there is no file {missing[0]}; name documents that are there")
    for path in documents:
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
