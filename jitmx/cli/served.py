"""The options that say which model is served and how, and the kernels that this takes: for `warmup` and `bundle`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from jitmx.cli.options import Count, as_field, kv_cache_option
from jitmx.errors import SettingError

if TYPE_CHECKING:
    from jitmx.arch import Arch
    from jitmx.registry.spec import Variant
    from jitmx.vllm.request import Request

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--model", metavar="NAME", help="Just what vLLM loads to serve it: gpt-oss-120b, gpt-oss-20b or a checkpoint."
    ),
    click.option("--layers", help="Of the model: those that jitmx serves, instead of JITMX_MXFP4_LAYERS."),
    click.option(
        "--tokens", type=Count(1, 1 << 24), default=16384, show_default=True,
        help="Of the model: tokens of a forward pass at most (vLLM's max_num_batched_tokens).",
    ),
    click.option("--ranks", type=Count(1, 1 << 16), default=1, help="Of the model: vLLM's tensor_parallel_size."),
    click.option("--lora", is_flag=True, help="Of the model: with LoRA on, on layers other than the experts."),
    click.option(
        "--requests", type=Count(1, 1 << 16), default=1024, show_default=True,
        help="Of its attention, where that is jitmx's, and its sampler: vLLM's max_num_seqs.",
    ),
    click.option(
        "--context", type=Count(1, 1 << 24), default=131072, show_default=True,
        help="Of its attention: tokens of a request at most (vLLM's max_model_len).",
    ),
    click.option(
        "--block-size", type=Count(16, 1 << 16, step=16), default=16, show_default=True,
        help="Of its attention: tokens of a page (vLLM's block_size), a multiple of 16.",
    ),
    kv_cache_option("Of its attention"),
    click.option(
        "--draft", metavar="NAME",
        help="Of the model: also its Eagle3 draft: gpt-oss-120b-eagle3, gpt-oss-20b-eagle3-32k or a checkpoint.",
    ),
    click.option("--draft-layers", help="Of the draft: those that jitmx serves, instead of JITMX_DRAFT_LAYERS."),
    click.option(
        "--draft-tokens", type=Count(1, 64), default=3, show_default=True,
        help="Of the draft: tokens that it proposes a step at most (vLLM's num_speculative_tokens).",
    ),
)  # fmt: skip


NOTHING = "no layer of the model is to be jitmx's; name some by --layers or JITMX_MXFP4_LAYERS"


@dataclass(frozen=True)
class ServedModel:
    """A model, and how vLLM serves it with jitmx: the options of `model_options`."""

    name: str
    layers: str | None
    tokens: int
    ranks: int
    lora: bool
    requests: int
    context: int
    block_size: int
    kv_cache_dtype: str
    draft: str | None = None
    draft_layers: str | None = None
    draft_tokens: int = 3

    def request(self) -> Request:
        """Which layers are to be jitmx's.

        Raises:
            click.UsageError: layers that there are not.
        """
        from jitmx.layers import DRAFT_FORMATS, FORMATS
        from jitmx.vllm.request import requested

        _require_layers("--layers", self.layers, FORMATS)
        _require_layers("--draft-layers", self.draft_layers, DRAFT_FORMATS)
        if self.draft_layers is not None and self.draft is None:
            raise click.UsageError("--draft-layers are of a draft model: name it by --draft")
        said = {"mxfp4_layers": self.layers, "draft_layers": self.draft_layers}
        asked = requested({key: value for key, value in said.items() if value is not None} or None)
        if self.draft is not None and not asked.draft:
            raise click.UsageError("--draft is a model whose layers are all vLLM's: name them by --draft-layers")
        return asked

    def variants(self, arches: tuple[Arch, ...], counts: tuple[int, ...] = ()) -> list[Variant]:
        """The variants that vLLM asks for when it serves the model.

        Args:
            counts: multiprocessors of the cards; by default those of the cards that the targets stand for, and those
                of the GPUs here.

        Raises:
            click.UsageError, InputError: layers or a model that there are not, or ranks that do not divide it.
        """
        from jitmx import models
        from jitmx.cli import targets
        from jitmx.serving.attention import cached
        from jitmx.serving.draft import Acceptance, of_draft
        from jitmx.serving.model import of_model
        from jitmx.serving.sampler import Sampler

        asked = self.request()
        model, served = models.find(self.name), asked.served(self.lora)
        stored = "e4m3" if self.kv_cache_dtype == "fp8" else "same"
        most = cached(self.requests, self.context, self.block_size, stored)
        attends = asked.attends(model.head_dim, self.lora)
        needed = [
            of_model(
                model, arch, served, tokens=self.tokens, ranks=self.ranks, lora=self.lora, fuse_norm=asked.fuse_norm,
                all_scales=asked.all_scales, x_format=asked.x_format, activation=asked.activation,
                attention=most if attends else None,
            )
            for arch in arches
        ]  # fmt: skip
        if self.draft is not None:
            draft = models.find_draft(self.draft)
            for arch, own in zip(arches, needed, strict=True):
                own += of_draft(
                    draft, arch, asked.draft, tokens=self.tokens, requests=self.requests, ranks=self.ranks,
                    fuse_norm=asked.fuse_norm, all_scales=asked.all_scales, attention=most if attends else None,
                    head=served.get("lm_head") if draft.vocabulary == model.vocabulary else None,
                )  # fmt: skip
        if asked.samples:
            logits = model.vocabulary, "bf16"
            for arch, own in zip(arches, needed, strict=True):
                own.append(Sampler(arch.name, None, self.requests, *logits))
                if self.draft is not None:
                    rows = self.requests * (1 + self.draft_tokens)
                    own.append(Acceptance(arch.name, None, rows, *logits))
        return targets.served_variants(arches, needed, counts)

    def about(self) -> dict[str, Any]:
        """What `variants` rests on, as JSON: the same wherever the model's checkpoint lies."""
        from jitmx import models

        asked, model = self.request(), models.find(self.name)
        named = {"model": self.name} if self.name in models.NAMED else {}
        choices = {name: getattr(asked, name) for name in ("fuse_norm", "all_scales", "x_format", "activation")}
        own = {
            item.name: getattr(self, item.name)
            for item in dataclasses.fields(self)
            if item.name not in ("name", "layers", "draft", "draft_layers", "draft_tokens")
        }
        if self.draft is not None:
            own |= {
                "draft": dataclasses.asdict(models.find_draft(self.draft)), "draft_layers": dict(asked.draft),
                "draft_tokens": self.draft_tokens,
            }  # fmt: skip
        return {
            **named, "sizes": model.config(), "layers": dict(sorted(asked.served(self.lora).items())),
            "attends": asked.attends(model.head_dim, self.lora), "samples": asked.samples, **choices, **own,
        }  # fmt: skip


def _require_layers(option: str, text: str | None, formats: Mapping[str, tuple[str, ...]]) -> None:
    from jitmx.layers import parse

    try:
        parse("none" if text is None else text, formats)
    except SettingError as error:
        raise click.UsageError(f"{option}={text}: {error}") from error


def model_options(function: _F) -> _F:
    """`--model` and how it is served; the verb receives `model: ServedModel | None`."""
    names = [item.name for item in dataclasses.fields(ServedModel) if item.name != "name"]

    @functools.wraps(function)
    def call(*arguments: Any, model: str | None, **values: Any) -> Any:
        how = {name: values.pop(name) for name in names}
        if model is None:
            _refuse(names, "how a model is served: name it by --model")
        elif how["draft"] is None:
            _refuse(["draft_tokens"], "how a draft is served: name it by --draft")
        return function(*arguments, model=None if model is None else ServedModel(model, **how), **values)

    options: Any = call
    for option in reversed(_OPTIONS):
        options = option(options)
    return options  # type: ignore[no-any-return]


def _refuse(names: list[str], says: str) -> None:
    """Without what they are about nothing reads these options."""
    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option, field = f"--{name.replace('_', '-')}", as_field(context, name)
            rest = f"give the operator's field as {field}" if field else f"leave {option} out"
            raise click.UsageError(f"{option} says {says}, or {rest}")
