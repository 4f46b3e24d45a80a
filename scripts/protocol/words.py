"""A tokenizer each of whose tokens is a word: its number. Text of any tokens is read back as these tokens.

A benchmark that makes text of random tokens, for a server that reads it, so gets the tokens that it drew, all of the
vocabulary. Text has five or six letters a token and a space, about as real text has.
"""

from __future__ import annotations

import json
from pathlib import Path


def write(folder: Path, vocabulary: int) -> None:
    """Write the tokenizer of a model with so many tokens into its folder; none is special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    # Unknown words become token 0: without one, a server fails at text that is not of this tokenizer.
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def tokens(text: str) -> list[int]:
    """The tokens of a text; -1 for a word that is none."""
    return [int(word) if word.isdecimal() else -1 for word in text.split()]
