"""What is compared: a stock backend of vLLM, or jitmx on a choice of layers, and how an engine is told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Any

from scripts.protocol.report import ProtocolError

LAYERS = ("moe", "qkv", "o", "lm_head")
FORMATS = ("mxfp4", "mxfp8")
STOCK = ("auto", "triton", "marlin", "humming")
ACTIVATIONS = ("bf16", "mxfp8", "mxfp4", "fp6", "fp8")
ATTENTION = ("auto", "on", "off")
_ANNOUNCED = {"auto": r"\w+", "triton": "TRITON", "marlin": "(BATCHED_)?MARLIN", "humming": "HUMMING"}
PLUGIN_GROUP = "vllm.general_plugins"
# What jitmx logs of attention that it serves, of layers with a window and of those without.
ATTENTION_SAID = "jitmx serves attention within a window in ", "jitmx serves attention in "


@dataclass(frozen=True)
class Configuration:
    """One way to serve a model.

    Attributes:
        layers: what jitmx serves, each a name of `LAYERS` and, where said, `:` and a format; empty: stock vLLM.
        backend: vLLM's MoE backend where jitmx does not serve the experts.
        activation: what jitmx's experts round their inputs to.
        tile: a tile for jitmx's experts, such as 64x128, over every table; "auto" leaves it to them.
        attention: jitmx's of every layer (on), vLLM's (off), or what jitmx's policy takes by default (auto).
        draft: what jitmx serves of a draft model, where there is one, as draft_layers has it.
        speculate: folder of an Eagle3 draft model; empty: none. drafts: tokens that it drafts a step.
        eager: no torch.compile and no CUDA graphs. Stock vLLM then rounds the residual stream where compiled code does
            not.
    """

    layers: tuple[str, ...] = ()
    backend: str = "auto"
    activation: str = "bf16"
    tile: str = "auto"
    attention: str = "auto"
    eager: bool = False
    draft: str = "none"
    speculate: str = ""
    drafts: int = 2

    def __post_init__(self) -> None:
        for item in self.layers:
            name, _, form = item.partition(":")
            if name not in LAYERS or (form and form not in FORMATS) or (name == "moe" and form not in ("", "mxfp4")):
                raise ProtocolError(
                    f"{item!r} is no layer; name some of {', '.join(LAYERS)}, dense ones with :mxfp4 or :mxfp8"
                )
        if self.backend not in STOCK:
            raise ProtocolError(f"backend {self.backend!r} is not one of {', '.join(STOCK)}")
        if self.activation not in ACTIVATIONS:
            raise ProtocolError(f"activation {self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.attention not in ATTENTION:
            raise ProtocolError(f"attention {self.attention!r} is not one of {', '.join(ATTENTION)}")
        own = self.activation, self.tile, self.attention, self.draft
        if not self.layers and own != ("bf16", "auto", "auto", "none"):
            raise ProtocolError(
                "activation, tile, attention and layers of a draft are jitmx's; name the layers that it serves, or "
                "leave them out"
            )

    @property
    def served(self) -> frozenset[str]:
        """The layers that jitmx serves, without their formats."""
        return frozenset(item.partition(":")[0] for item in self.layers)

    @property
    def formats(self) -> frozenset[str]:
        """The layers that jitmx serves, each as `qkv:mxfp4`."""
        return frozenset(item if ":" in item else f"{item}:{FORMATS[0]}" for item in self.layers)

    @property
    def attends(self) -> bool:
        """Whether attention is jitmx's, by the policy of its plugin."""
        from jitmx.vllm.request import requested

        return bool(self.layers) and requested(self._options(), environ={}).serves_attention()

    @property
    def attention_by(self) -> str:
        """Who serves attention: "jitmx" or "vLLM"."""
        return "jitmx" if self.attends else "vLLM"

    def _options(self) -> dict[str, str]:
        """What the plugin is asked for by vLLM's additional_config."""
        found = {"mxfp4_layers": ",".join(self.layers), "attention": self.attention}
        return found | ({"draft_layers": self.draft} if self.draft != "none" else {})

    @property
    def name(self) -> str:
        """Short and unique: `stock-triton`, `jitmx-moe+qkv:mxfp8-act:mxfp8-tile:64x128`."""
        if not self.layers:
            parts = [f"stock-{self.backend}"]
            return "-".join([*parts, *(["eager"] if self.eager else []), *self._speculation])
        parts = [f"jitmx-{'+'.join(self.layers)}"]
        parts += [f"backend:{self.backend}"] if "moe" not in self.served else []
        parts += [f"act:{self.activation}"] if self.activation != "bf16" else []
        parts += [f"tile:{self.tile}"] if self.tile != "auto" else []
        parts += [f"attn:{self.attention}"] if self.attention != "auto" else []
        parts += ["eager"] if self.eager else []
        parts += [f"draft:{self.draft.replace(',', '+')}"] if self.draft != "none" else []
        return "-".join([*parts, *self._speculation])

    @property
    def _speculation(self) -> list[str]:
        return [f"k:{self.drafts}"] if self.speculate else []

    def announced(self) -> list[str]:
        """Regular expressions, each of which an engine's log holds."""
        found = []
        for item in self.layers:
            name, _, form = item.partition(":")
            found.append(f"jitmx serves {name} in {form or FORMATS[0]} ")
        if "moe" not in self.served:
            found.append(rf"Using '{_ANNOUNCED[self.backend]}' Mxfp4 MoE backend")
        return [*found, *(ATTENTION_SAID if self.attends else ())]

    def engine(self) -> dict[str, Any]:
        """Arguments of vLLM's engine; each is also an option of `vllm serve`."""
        options: dict[str, Any] = {}
        if self.layers:
            options["additional_config"] = {"jitmx": self._options()}
        if self.backend != "auto" and "moe" not in self.served:
            options["kernel_config"] = {"moe_backend": self.backend}
        if self.eager:
            options["enforce_eager"] = True
        if self.speculate:
            options["speculative_config"] = {
                "method": "eagle3", "model": self.speculate, "num_speculative_tokens": self.drafts,
            }  # fmt: skip
        return options

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for an engine of this configuration, from `base` or this process's own.

        What would choose layers, kernels or tiles by itself is taken out, so that a run is what its name says.
        """
        from jitmx import settings

        kept = dict(os.environ if base is None else base)
        # Variables, with their aliases, that change which kernels serve what.
        fields = ("linear_", "moe_", "mxfp4_", "draft_", "quantize_", "fuse_", "attention")
        choosing = [item for item in settings.TABLE if item.field.startswith(fields)]
        for name in ("VLLM_PLUGINS", *(name for item in choosing for name in (item.name, *item.aliases))):
            kept.pop(name, None)
        kept["VLLM_PLUGINS"] = ",".join(plugins(with_jitmx=bool(self.layers)))
        if self.activation != "bf16":
            kept["JITMX_MOE_ACTIVATION"] = self.activation
            if self.activation in settings.LINEAR_ACTIVATIONS:  # dense layers take it too
                kept["JITMX_LINEAR_ACTIVATION"] = self.activation
        if self.tile != "auto":
            kept["JITMX_MOE_TILE"] = self.tile
        return kept

    def as_dict(self) -> dict[str, Any]:
        """Name and fields, and who serves attention, for a report."""
        return {"name": self.name, **asdict(self), "attention_by": self.attention_by}


def layers(text: str) -> tuple[str, ...]:
    """Layers from `moe,qkv:mxfp8`, `all` or `none`, in the order of the model.

    Raises:
        ProtocolError: no such layer, or one named twice.
    """
    if text in ("all", "none"):
        return LAYERS if text == "all" else ()
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ProtocolError(f"{text!r} names no layer; give some of {', '.join(LAYERS)}, or all, or none")
    names = [item.partition(":")[0] for item in Configuration(found).layers]
    if len(set(names)) < len(names):
        raise ProtocolError(f"{text!r} names a layer twice")
    return tuple(sorted(found, key=lambda item: LAYERS.index(item.partition(":")[0])))


def plugins(*, with_jitmx: bool) -> list[str]:
    """Names of the vLLM plugins to load: those installed, with or without jitmx's.

    Raises:
        ProtocolError: jitmx's is wanted and not installed.
    """
    found = {point.name: point.value.partition(":")[0] for point in entry_points(group=PLUGIN_GROUP)}
    ours = sorted(name for name, module in found.items() if module.split(".")[0] == "jitmx")
    if not with_jitmx:
        return sorted(set(found) - set(ours))
    if not ours:
        raise ProtocolError(f"jitmx has no entry point in {PLUGIN_GROUP}; install it with: pip install -e '.[vllm]'")
    return sorted(found)
