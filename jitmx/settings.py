"""Every environment variable that jitmx reads, in one table.

`JITMX_*` names are canonical. Names that engineers already have in their scripts (those of FlashInfer and of its use in
vLLM) are honoured as aliases: the canonical name wins where both are set. The environment is read once per process;
`jitmx env` prints each setting with its value and where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from jitmx import layers, resources, setting_text
from jitmx.errors import SettingError
from jitmx.quoting import short

MODES = ("auto", "required", "off")


@dataclass(frozen=True)
class Setting:
    """One variable: its name, the aliases it honours, how its text is read and what it is for."""

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Callable[[], Any]
    choices: str
    help: str
    aliases: tuple[str, ...] = ()


def _folders(text: str) -> tuple[Path, ...]:
    folders = tuple(folder.absolute() for folder in setting_text.paths(text))
    taken: set[str] = set()
    for folder in folders:
        found = resources.families(folder / "kernels", folder / "templates")
        if not found:
            raise setting_text.Unfit(f"{folder} has no family: no module in kernels/ with a folder in templates/")
        if hidden := resources.hidden(folder):
            raise setting_text.Unfit(f"{hidden} has the name of a module of jitmx; rename it")
        if again := sorted(taken & set(found)):
            raise setting_text.Unfit(f"{folder} has a family {again[0]}, and there is one already; rename it")
        taken.update(found)
    return folders


def _of_family(name: str) -> tuple[Setting, Setting]:
    """The variables that override what tables and heuristics choose for a family."""
    of = f"JITMX_{name.upper()}"
    knobs = Setting(
        f"{of}_KNOBS", f"{name}_knobs", setting_text.knobs, tuple, "knob=value pairs, separated by ','",
        f"knobs of the {name} kernels that override every table, and kernel=NAME for one of them",
    )  # fmt: skip
    tile = Setting(
        f"{of}_TILE", f"{name}_tile", setting_text.tile_or_auto, lambda: None,
        "auto, or MxN, MxNxK, either with a suffix sSTAGES, such as 64x128x128s4",
        f"tile of those {name} kernels that have one: M rows of the activations by N of the weight, K columns a stage",
        _TILE_ALIASES.get(name, ()),
    )  # fmt: skip
    return knobs, tile


def _flag(name: str, field: str, help: str, *, default: bool = False, aliases: tuple[str, ...] = ()) -> Setting:
    return Setting(name, field, setting_text.flag, lambda: default, "0 or 1", help, aliases)


_TILE_ALIASES = {"moe": ("FLASHINFER_MOE_TILE",)}

MOE_KERNELS = ("auto", "gemm", "gemv", "marlin", "triton")
MOE_ACTIVATIONS = ("bf16", "mxfp8", "mxfp4", "fp6")


TABLE: tuple[Setting, ...] = (
    Setting(
        "JITMX_CACHE_DIR",
        "cache_dir",
        setting_text.path,
        lambda: Path(platformdirs.user_cache_dir("jitmx")),
        "a directory",
        "where compiled kernels are kept",
    ),
    Setting(
        "JITMX_SITE_CACHE",
        "site_cache",
        setting_text.paths,
        tuple,
        "directories, separated by ':'",
        "read-only caches that are looked in after the user's own",
    ),
    Setting(
        "JITMX_MODE",
        "mode",
        setting_text.choice(*MODES),
        lambda: "auto",
        "auto, required or off",
        "auto compiles on demand; required never compiles while serving; off leaves the disk alone",
    ),
    _flag(
        "JITMX_ALLOW_SHARED_CACHE",
        "allow_shared_cache",
        "accept a cache directory that other users can write to",
    ),
    Setting(
        "JITMX_LOCK_TIMEOUT",
        "lock_timeout",
        setting_text.seconds,
        lambda: 120.0,
        "seconds, 0 to 1e6",
        "how long to wait for another process that compiles the same kernel before compiling privately",
    ),
    Setting(
        "JITMX_ARCH",
        "arches",
        setting_text.arches,
        tuple,
        "SM targets such as sm_121, separated by ',' or ' '",
        "targets that warm-up compiles for where no GPU is present",
        ("FLASHINFER_CUDA_ARCH_LIST",),
    ),
    Setting(
        "JITMX_JOBS",
        "jobs",
        setting_text.jobs,
        lambda: None,
        f"a number, 1 to {setting_text.MOST_JOBS}",
        "compiles at once; by default as many as cores and memory allow",
        ("FLASHINFER_NVCC_THREADS",),
    ),
    Setting(
        "JITMX_LOG_LEVEL",
        "log_level",
        setting_text.log_level,
        lambda: 2,
        "0 (silent) to 5 (everything)",
        "how much jitmx logs, on stderr or as the program says: 1 errors, 2 warnings, 3 information, 4 and 5 debugging",
        ("FLASHINFER_LOGLEVEL",),
    ),
    _flag(
        "JITMX_VERBOSE",
        "verbose",
        "log every compile with its time and resource use (on stderr, or as the program says)",
        aliases=("FLASHINFER_JIT_VERBOSE",),
    ),
    Setting(
        "JITMX_TACTICS",
        "tactics_dir",
        setting_text.path,
        lambda: Path(platformdirs.user_config_dir("jitmx")) / "tactics",
        "a directory",
        "tuning tables of your own, <arch>/<family>.json; they come before the shipped ones",
    ),
    Setting(
        "JITMX_FAMILIES",
        "families",
        _folders,
        tuple,
        "directories, separated by ':'",
        "folders with kernel families of your own (kernels/, templates/, tactics/); their code is loaded",
    ),
    *(setting for family in resources.families() for setting in _of_family(family)),
    Setting(
        "JITMX_MXFP4_LAYERS",
        "mxfp4_layers",
        setting_text.chosen_layers,
        lambda: None,
        "moe, qkv, o, lm_head, separated by ',', each with :mxfp4 or :mxfp8 where that is to be said; or all; or none",
        "layers of a model in vLLM that jitmx serves; by default moe",
    ),
    Setting(
        "JITMX_MOE_KERNEL",
        "moe_kernel",
        setting_text.choice(*MOE_KERNELS),
        lambda: "auto",
        "auto, gemm, gemv, marlin or triton",
        "experts in vLLM: auto, gemm and gemv are jitmx's; marlin and triton hand the layer back to vLLM",
        ("VLLM_MXFP4_MOE_KERNEL",),
    ),
    Setting(
        "JITMX_MOE_ACTIVATION",
        "moe_activation",
        setting_text.choice(*MOE_ACTIVATIONS),
        lambda: "bf16",
        "bf16, mxfp8, mxfp4 or fp6",
        "what the experts' inputs are rounded to in vLLM",
        ("VLLM_MXFP4_ACTIVATION",),
    ),
    _flag(
        "JITMX_FUSE_NORM",
        "fuse_norm",
        "RMSNorm and residual of a block in vLLM go into its products, where all of them are jitmx's",
        default=True,
    ),
    _flag(
        "JITMX_ALL_SCALES",
        "all_scales",
        "layers in vLLM take kernels for all scales from the start, so that weights loaded again are never refused",
    ),
    Setting(
        "JITMX_ATTENTION",
        "attention",
        setting_text.switch,
        lambda: None,
        "auto, on or off",
        "attention of gpt-oss in vLLM is jitmx's (on) or vLLM's (off); auto: vLLM's for now",
        ("VLLM_ATTENTION_SINKS", "VLLM_USE_ATTENTION_SINKS"),
    ),
    *(
        Setting(
            f"JITMX_QUANTIZE_{layer.upper()}",
            f"quantize_{layer}",
            setting_text.switch,
            lambda: None,
            "0, 1 or auto",
            f"adds {layer} to the layers that jitmx serves in vLLM (1), takes it away (0) or leaves it as it is (auto)",
            (f"VLLM_MXFP4_QUANTIZE_{layer.upper()}",),
        )
        for layer in layers.KINDS[1:]
    ),
)

_FAMILIES = next(setting for setting in TABLE if setting.field == "families")


def table(environ: Mapping[str, str] | None = None) -> tuple[Setting, ...]:
    """Every setting: those of `TABLE`, and of the families that `environ` (default: the process's own) adds.

    Raises:
        SettingError: the folders that it names have none.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(_FAMILIES.name, "")
    return TABLE + _added(text) if text else TABLE


@functools.cache
def _added(text: str) -> tuple[Setting, ...]:
    folders = _parsed(_FAMILIES, _FAMILIES.name, text)
    names = [name for folder in folders for name in resources.families(folder / "kernels", folder / "templates")]
    return tuple(setting for name in names for setting in _of_family(name))


def _parsed(setting: Setting, source: str, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        detail = f" ({error})" if isinstance(error, setting_text.Unfit) else ""
        raise SettingError(f"{source}={short(text)} is not {setting.choices}{detail}") from None


@dataclass(frozen=True)
class Settings:
    """The settings of one process. Field names are those of `TABLE`.

    Attributes:
        overrides: what overrides choices for families, by field; `value` reads it too.
    """

    cache_dir: Path
    site_cache: tuple[Path, ...]
    mode: str
    allow_shared_cache: bool
    lock_timeout: float
    arches: tuple[str, ...]
    jobs: int | None
    log_level: int
    verbose: bool
    tactics_dir: Path
    families: tuple[Path, ...]
    mxfp4_layers: tuple[tuple[str, str], ...] | None
    moe_kernel: str
    moe_activation: str
    fuse_norm: bool
    all_scales: bool
    attention: bool | None
    quantize_qkv: bool | None
    quantize_o: bool | None
    quantize_lm_head: bool | None
    overrides: Mapping[str, Any] = field(hash=False)

    def value(self, field: str) -> Any:
        """The value of a setting by its field."""
        return self.overrides[field] if field in self.overrides else getattr(self, field)


# What the program that jitmx runs in chose in place of the environment: field to value, and what says so.
_chosen: dict[str, tuple[Any, str]] = {}


def origin(field: str, environ: Mapping[str, str] | None = None) -> str:
    """The variable that decides `field`, or "default"; or what else does, of this process."""
    if environ is None and field in _chosen:
        return _chosen[field][1]
    environ = os.environ if environ is None else environ
    setting = next(setting for setting in table(environ) if setting.field == field)
    return next((name for name in (setting.name, *setting.aliases) if environ.get(name)), "default")


def read(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings read from `environ` (default: the process's own), every value checked.

    An empty variable counts as unset.

    Raises:
        SettingError: a value outside its choices, or a JITMX_* variable that does not exist.
    """
    environ = os.environ if environ is None else environ
    settings = table(environ)
    known = {setting.name for setting in settings}
    for name in environ:
        if name.startswith("JITMX_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
            raise SettingError(f"{name if len(name) < 100 else short(name)} is not a setting of jitmx{hint}")
    values: dict[str, Any] = {}
    for setting in settings:
        source = origin(setting.field, environ)
        text = "" if source == "default" else environ[source]
        values[setting.field] = _parsed(setting, source, text) if text else setting.default()
    return _settings(values)


def _settings(values: Mapping[str, Any]) -> Settings:
    own = {item.name for item in dataclasses.fields(Settings)}
    overrides = {field: value for field, value in values.items() if field not in own}
    return Settings(**{field: value for field, value in values.items() if field in own}, overrides=overrides)


@functools.cache
def current() -> Settings:
    """The settings of this process, read once. Tests and tools that change the environment call `reload()`."""
    found, chosen = read(), {field: value for field, (value, _) in _chosen.items()}
    overrides = {field: chosen.pop(field, value) for field, value in found.overrides.items()}
    return dataclasses.replace(found, **chosen, overrides=overrides)


# What is called when settings may be others.
_forgetting: list[Callable[[], object]] = []


def when_changed(forget: Callable[[], object]) -> None:
    """Have `forget` called whenever settings may be others: for who keeps what was decided under those of before."""
    _forgetting.append(forget)


def _changed() -> None:
    current.cache_clear()
    for forget in _forgetting:
        forget()


def choose(field: str, value: Any, said: str) -> Settings:
    """Take `value` for a setting of this process from now on, whatever the environment says; `said` is its origin."""
    _chosen[field] = value, said
    _changed()
    return current()


def release(field: str) -> None:
    """Forget what was chosen for a setting in the place of the environment, if anything was."""
    if _chosen.pop(field, None) is not None:
        _changed()


def reload() -> Settings:
    """Read the environment again, and forget what was chosen in its place.

    The next call of every operator is planned anew; CUDA graphs keep the kernels that they were captured with. Call it
    while no other thread calls an operator for the first time: that may be planned under the settings of before.

    Raises:
        SettingError: as `read` does; what was planned is forgotten all the same.
    """
    _chosen.clear()
    _changed()
    return current()
