"""What was asked of jitmx in vLLM: by vLLM's additional_config, and where it says nothing by the environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jitmx import layers, settings
from jitmx.errors import SettingError
from jitmx.kernels.attention.problem import HEAD_DIMS
from jitmx.settings import Settings

# Keys of --additional-config '{"jitmx": {...}}': each takes the place of the setting of its name.
KEYS = ("mxfp4_layers", "moe_kernel", "moe_activation", "linear_activation", "fuse_norm", "all_scales", "attention",
        "greedy_sampler", "draft_layers")  # fmt: skip
FLAGS = ("fuse_norm", "all_scales", "attention", "greedy_sampler")  # these may also be a bool or a number
# Attention that nobody asked for or against is jitmx's where it serves all of these.
ATTENTION_BESIDE = frozenset(("moe", "qkv", "o"))
DEFAULT = {"moe": "mxfp4"}
STOCK_KERNELS = ("marlin", "triton")
# What the experts' inputs are rounded to, and what `jitmx.moe` calls it.
X_FORMATS = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "fp6": "mxfp6", "fp8": "fp8"}


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        layers: the format of each layer asked for.
        draft: the same of the draft model.
        said: by kind of layer, and for what else there is, where that was said.
        moe_kernel, moe_activation, linear_activation, fuse_norm, all_scales, attention, greedy_sampler: as
            JITMX_MOE_KERNEL, JITMX_MOE_ACTIVATION, JITMX_LINEAR_ACTIVATION, JITMX_FUSE_NORM, JITMX_ALL_SCALES,
            JITMX_ATTENTION and JITMX_GREEDY_SAMPLER.
    """

    layers: Mapping[str, str]
    said: Mapping[str, str]
    moe_kernel: str = "auto"
    moe_activation: str = "bf16"
    linear_activation: str = "bf16"
    fuse_norm: bool = True
    all_scales: bool = False
    attention: bool | None = None
    greedy_sampler: bool = True
    draft: Mapping[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether greedy batches are to be jitmx's: where it is to serve anything else, too."""
        return self.greedy_sampler and bool(self.layers or self.attention)

    def serves_attention(self, lora: bool = False) -> bool:
        """Whether attention is to be jitmx's where nothing stands against it: as asked, by default beside the layers in
        `ATTENTION_BESIDE`, which adapters (`lora`) may leave to vLLM."""
        return self.served(lora).keys() >= ATTENTION_BESIDE if self.attention is None else self.attention

    def attends(self, head_dim: int, lora: bool = False) -> bool:
        """Whether attention of heads of so many values is to be jitmx's; by default, only where it can be."""
        return self.serves_attention(lora) and (bool(self.attention) or head_dim in HEAD_DIMS)

    @property
    def x_format(self) -> str:
        """What the experts' inputs are rounded to, as `jitmx.moe` calls it."""
        return X_FORMATS[self.moe_activation]

    @property
    def activation(self) -> str:
        """What the inputs of dense layers are rounded to, as `jitmx.linear` calls it, or "none"."""
        return "none" if self.linear_activation == "bf16" else self.linear_activation

    def served(self, lora: bool = False) -> dict[str, str]:
        """The formats of the layers that jitmx serves where nothing but adapters (`lora`) stands against it."""
        stock = self.moe_kernel in STOCK_KERNELS
        return {kind: format for kind, format in self.layers.items() if not (stock if kind == "moe" else lora)}


def requested(options: Any = None, read: Settings | None = None, environ: Mapping[str, str] | None = None) -> Request:
    """What was asked for: by `options` where they say it, else by the environment.

    Args:
        options: the value of "jitmx" in vLLM's additional_config, a mapping with keys of `KEYS`, or None.
        read: the settings; by default those of `environ`, and without it those of this process.
        environ: the environment that says where a setting came from.

    Raises:
        SettingError: an unknown key, layer, format or kernel.
    """
    if read is None:
        read = settings.current() if environ is None else settings.read(environ)
    own = _checked(options)
    said = {name: settings.origin(name, environ) for name in KEYS if name != "mxfp4_layers"}
    said.update({name: f"additional_config's {name}" for name in own if name in said})
    if "mxfp4_layers" in own:
        chosen, where = dict(own["mxfp4_layers"]), "additional_config's mxfp4_layers"
        said.update(dict.fromkeys(layers.KINDS, where))
    else:
        asked = read.mxfp4_layers
        chosen = dict(DEFAULT if asked is None else asked)
        where = settings.origin("mxfp4_layers", environ)
        said.update(dict.fromkeys(layers.KINDS, where))
        for kind in layers.KINDS[1:]:
            switch = getattr(read, f"quantize_{kind}")
            if switch is None:
                continue
            said[kind] = f"{settings.origin(f'quantize_{kind}', environ)}={int(switch)}"
            if switch:
                chosen.setdefault(kind, layers.FORMATS[kind][0])
            else:
                chosen.pop(kind, None)
    rest = {name: own.get(name, getattr(read, name)) for name in KEYS if not name.endswith("_layers")}
    return Request(chosen, said, draft=dict(own.get("draft_layers", read.draft_layers)), **rest)


def _checked(options: Any) -> dict[str, Any]:
    """The options as the settings of the same name are read."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise SettingError(
            f"additional_config's jitmx is {options!r}, and must be an object with keys of {', '.join(KEYS)}"
        )
    by_field = {setting.field: setting for setting in settings.TABLE}
    found: dict[str, Any] = {}
    for key, value in options.items():
        if key not in KEYS:
            close = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(KEYS)}"
            raise SettingError(f"additional_config's jitmx has no {key!r}", hint)
        setting = by_field[key]
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) and key.endswith("_layers") else value
        text = str(int(text)) if isinstance(text, int) and key in FLAGS else text
        if not isinstance(text, str):
            raise SettingError(f"additional_config's jitmx.{key} is {value!r}, and must be a text: {setting.choices}")
        try:
            found[key] = setting.parse(text)
        except ValueError as error:
            why = f" ({error})" if isinstance(error.__cause__, Exception) else ""
            raise SettingError(f"additional_config's jitmx.{key}={value!r} is not {setting.choices}{why}") from None
    return found
