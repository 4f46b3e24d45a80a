"""Synthetic gpt-oss checkpoints: random weights of a trained model's scale, the same bytes from a seed."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from jitmx import formats
from jitmx.errors import InputError
from scripts.protocol.sizes import Drawn, Sizes, config, entries

# Blocks of quantized normal values, from which all blocks are drawn: to quantize 60 GB of values would take hours.
_POOL = 1 << 16
# Values that are rounded or drawn at a time: bounds the memory that float64 takes.
_SLICE = 1 << 24
_DENSE = re.compile(r"\.(q|k|v|o)_proj\.weight$|^lm_head\.weight$")
# In config.json: how a synthetic checkpoint was made.
MADE = "jitmx_synthetic"

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Written:
    """What was written: the folder, its weight files in order, and bytes of tensors."""

    folder: Path
    files: tuple[str, ...]
    nbytes: int


def write(
    folder: Path,
    sizes: Sizes,
    *,
    seed: int = 0,
    on_grid: bool = False,
    shard_bytes: int = 5 << 30,
    tokenizer: bool = True,
    make: Callable[[Drawn], Tensors] | None = None,
) -> Written:
    """Write a checkpoint into `folder`, made if need be.

    A tensor depends on the seed, its name and its shape alone, not on how the checkpoint is split.

    Args:
        on_grid: round the weights of attention and output layer to values that MXFP4 holds, so that quantizing them
            changes nothing and every choice of layers is the same model.
        shard_bytes: bytes of tensors a file at most; a larger entry gets a file of its own.
        tokenizer: also write a tokenizer: a token a byte, and names for the rest of the vocabulary.
        make: the tensors of an entry, instead of `draw`.

    Raises:
        InputError: the folder holds files already, or a size that no model can have.
    """
    require_empty(folder)
    if tokenizer and sizes.vocab < 256 + 2:
        raise InputError(f"vocab={sizes.vocab} has no room for a token a byte; give 258 or more, or no tokenizer")
    drawn = make or (lambda entry: draw(entry, seed, on_grid))
    if shard_bytes < 1:
        raise InputError(f"shard_bytes={shard_bytes} is not positive; give 1 or more")
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"eos_token_id": sizes.end_token, "pad_token_id": sizes.pad_token, "do_sample": False}
    _json(folder / "generation_config.json", ends)
    if tokenizer:
        _tokenizer(folder, sizes)
    made = {"seed": seed, "on_grid": on_grid, "shard_bytes": shard_bytes}
    return save(folder, list(entries(sizes)), drawn, config(sizes) | {MADE: made}, shard_bytes)


def save(
    folder: Path, drawn: list[Drawn], make: Callable[[Drawn], Tensors], settings: Mapping[str, Any], shard_bytes: int
) -> Written:
    """Write the tensors of entries into `folder`, which is made if need be, and then its configuration.

    Args:
        make: the tensors of an entry.
        settings: the config.json.
        shard_bytes: as in `write`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split(drawn, shard_bytes)
    places: dict[str, str] = {}
    files, nbytes = [], 0
    for number, shard in enumerate(shards):
        tensors = {name: tensor for entry in shard for name, tensor in make(entry).items()}
        file = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
        files.append(file)
    if len(files) > 1:
        _json(folder / "model.safetensors.index.json", {"metadata": {"total_size": nbytes}, "weight_map": places})
    # Last: a folder with a configuration is a whole checkpoint.
    _json(folder / "config.json", dict(settings))
    return Written(folder, tuple(files), nbytes)


def draw(entry: Drawn, seed: int, on_grid: bool = False) -> Tensors:
    """The tensors of one entry: one, or blocks and scales."""
    if entry.kind == "ones":
        return {entry.name: torch.ones(entry.shape, dtype=torch.bfloat16)}
    generator = np.random.Generator(np.random.Philox(key=_key(seed, entry.name)))
    if entry.kind == "mxfp4":
        codes, scales = _pool(entry.deviation, seed)
        *rows, k = entry.shape
        picks = generator.integers(0, _POOL, (*rows, k // formats.BLOCK), dtype=np.uint16)
        return {
            f"{entry.name}_blocks": torch.from_numpy(codes[picks]),
            f"{entry.name}_scales": torch.from_numpy(scales[picks]),
        }
    values = generator.standard_normal(entry.shape, dtype=np.float32) * np.float32(entry.deviation)
    tensor = torch.from_numpy(values).bfloat16()
    return {entry.name: round_to_grid(tensor) if on_grid and entry.kind == "grid" else tensor}


def round_to_grid(weight: torch.Tensor) -> torch.Tensor:
    """The nearest values that MXFP4 holds, in blocks of 32 along the last axis; the same when done again.

    Args:
        weight: [..., k] bfloat16, k a multiple of 32.
    """
    if weight.shape[-1] % formats.BLOCK:
        raise InputError(f"{list(weight.shape)}: the last axis is not a multiple of {formats.BLOCK}, an MXFP4 block")
    item = formats.get("mxfp4")
    flat = weight.reshape(-1, formats.BLOCK)
    parts = [
        torch.from_numpy(formats.dequantize(*formats.quantize(part.double().numpy(), item), item)).to(weight.dtype)
        for part in flat.split(_SLICE // formats.BLOCK)
    ]
    return torch.cat(parts).reshape(weight.shape)


def rounded_copy(source: Path, folder: Path) -> Written:
    """A copy of the checkpoint in `source` whose dense weights are rounded as `round_to_grid` does.

    Raises:
        InputError: no checkpoint is there, or `folder` holds files already.
    """
    require_empty(folder)
    found = _files(source)
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = 0
    for file in found:
        tensors = {name: round_to_grid(t) if _DENSE.search(name) else t for name, t in _tensors(file)}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        nbytes += sum(tensor.nbytes for tensor in tensors.values())
    for file in source.glob("*"):
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model"):
            (folder / file.name).write_bytes(file.read_bytes())
    return Written(folder, tuple(file.name for file in found), nbytes)


def digest(folder: Path) -> str:
    """SHA-256 over configuration and tensors, whatever files they are split over.

    Raises:
        InputError: there are none.
    """
    places: dict[str, Path] = {}
    for file in _files(folder):
        with safe_open(file, framework="pt") as weights:
            places |= dict.fromkeys(weights.keys(), file)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop(MADE, None)
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, file in sorted(places.items()):
        with safe_open(file, framework="pt") as weights:
            tensor = weights.get_tensor(name).contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.view(torch.uint8).numpy().data)
    return found.hexdigest()


def dense_on_grid(folder: Path) -> bool:
    """Whether MXFP4 holds every dense weight of a checkpoint exactly.

    Raises:
        InputError: there is none.
    """
    found = [
        torch.equal(round_to_grid(tensor), tensor)
        for file in sorted(folder.glob("*.safetensors"))
        for _, tensor in _tensors(file, _DENSE)
    ]
    if not found:
        raise InputError(f"{folder} holds no weights of attention and output layer in *.safetensors")
    return all(found)


def require_empty(folder: Path) -> None:
    """Refuse a folder that holds files, with `InputError`."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; name a new folder, or remove it first")


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found or not (folder / "config.json").is_file():
        raise InputError(f"{folder} holds no checkpoint: config.json and *.safetensors are wanted")
    return found


def _tensors(file: Path, named: re.Pattern[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            if named is None or named.search(name):
                yield name, weights.get_tensor(name)


def _split(drawn: list[Drawn], limit: int) -> list[list[Drawn]]:
    shards: list[list[Drawn]] = [[]]
    for entry in drawn:
        if shards[-1] and sum(item.nbytes for item in shards[-1]) + entry.nbytes > limit:
            shards.append([])
        shards[-1].append(entry)
    return shards


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")


@functools.lru_cache(maxsize=4)
def _pool(deviation: float, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Packed codes [pool, 16] and scales [pool] of normal values with this standard deviation."""
    generator = np.random.Generator(np.random.Philox(key=_key(seed, f"pool {deviation!r}")))
    values = generator.standard_normal((_POOL, formats.BLOCK)) * deviation
    codes, scales = formats.quantize(values, formats.get("mxfp4"))
    return formats.pack_nibbles(codes), scales[:, 0]


def _tokenizer(folder: Path, sizes: Sizes) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + [f"<|{number}|>" for number in range(256, sizes.vocab - 2)] + ["<|pad|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names[-2:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|pad|>",
        "model_max_length": sizes.positions, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    _json(folder / "tokenizer_config.json", settings)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
