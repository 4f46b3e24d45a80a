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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitmx import resources, setting_text
from jitmx.errors import SettingError
from jitmx.quoting import short

MODES = ("auto", "required", "off")


@dataclass(frozen=True)
class Setting:
    """One variable: its name, the aliases it honours, how its text is read and what it is for.

    What it is by default is `default`, or what that gives when called.
    """

    name: str
    field: str
    parse: Callable[[str], Any]
    default: Any
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


def _user_folder(kind: str) -> Path:
    """Where a user's files of a kind, "cache" or "config", lie."""
    import platformdirs  # as long as all the rest of this module, and nothing before settings are read needs it

    return Path(getattr(platformdirs, f"user_{kind}_dir")("jitmx"))


# How a variable's text is read, and its choices in words.
Reading = tuple[Callable[[str], Any], str]

_DIRECTORY: Reading = setting_text.path, "a directory"
_DIRECTORIES = "directories, separated by ':'"
_FLAG: Reading = setting_text.flag, "0 or 1"


def _one_of(*choices: str) -> Reading:
    return setting_text.choice(*choices), f"{', '.join(choices[:-1])} or {choices[-1]}"


def _of_family(name: str) -> tuple[Setting, Setting]:
    """The variables that override what tables and heuristics choose for a family."""
    of = f"JITMX_{name.upper()}"
    knobs = Setting(
        f"{of}_KNOBS", f"{name}_knobs", setting_text.knobs, (), "knob=value pairs, separated by ','",
        f"knobs of the {name} kernels that override every table, and kernel=NAME for one of them",
    )  # fmt: skip
    tile = Setting(
        f"{of}_TILE", f"{name}_tile", setting_text.tile_or_auto, None,
        "auto, or MxN, MxNxK, either with a suffix sSTAGES, such as 64x128x128s4",
        f"tile of those {name} kernels that have one: M rows of the activations by N of the weight, K columns a step",
        _TILE_ALIASES.get(name, ()),
    )  # fmt: skip
    return knobs, tile


def _setting(reading: Reading, default: Any, help: str, *aliases: str, name: str = "") -> Any:
    """A field of `Settings`, with what else there is to say of it; `name` is that of its variable if it is another."""
    parse, choices = reading
    return field(metadata={"parse": parse, "default": default, "choices": choices, "help": help, "aliases": aliases,
                           "name": name})  # fmt: skip


def _quantizes(layer: str) -> Any:
    said = f"adds {layer} to the layers that jitmx serves in vLLM (1), takes it away (0) or leaves it as it is (auto)"
    return _setting((setting_text.switch, "0, 1 or auto"), None, said, f"VLLM_MXFP4_QUANTIZE_{layer.upper()}")


_TILE_ALIASES = {"moe": ("FLASHINFER_MOE_TILE",)}

MOE_KERNELS = ("auto", "gemm", "gemv", "marlin", "triton")
MOE_ACTIVATIONS = ("bf16", "mxfp8", "mxfp4", "fp6", "fp8")
LINEAR_ACTIVATIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class Settings:
    """The settings of one process: each a variable named after its field, but for a few.

    Attributes:
        overrides: what overrides choices for families, by field; `value` reads it too.
    """

    overrides: Mapping[str, Any] = field(hash=False)
    cache_dir: Path = _setting(  # noqa: RUF009 - it is a field
        _DIRECTORY, lambda: _user_folder("cache"), "where compiled kernels are kept"
    )
    site_cache: tuple[Path, ...] = _setting(
        (setting_text.paths, "directories or bundles, separated by ':'"), (),
        "read-only caches that are looked in after the user's own",
    )  # fmt: skip
    bundle_keys: tuple[Path, ...] = _setting(
        (setting_text.paths, "public keys (PEM) or directories of them, separated by ':'"), (),
        "bundles, and what comes from the remote cache, must be signed by one of these keys",
    )  # fmt: skip
    signing_key: Path | None = _setting(  # noqa: RUF009
        (setting_text.path, "a private key (PEM)"), None, "signs what is written to the remote cache"
    )
    remote_cache: str | None = _setting(
        (setting_text.url, "a URL that fsspec opens, such as s3://bucket/jitmx"), None,
        "a cache that hosts share; it is looked in after all others",
    )  # fmt: skip
    remote_write: bool = _setting(_FLAG, False, "write to the remote cache what is compiled here")
    remote_timeout: float = _setting(
        (setting_text.patience, "seconds, 0.1 to 600"), 5.0, "how long to wait for one answer of the remote cache"
    )
    mode: str = _setting(
        _one_of(*MODES), "auto",
        "auto compiles on demand; required never compiles while serving; off leaves the disk alone",
    )  # fmt: skip
    allow_shared_cache: bool = _setting(_FLAG, False, "accept a cache directory that other users can write to")
    lock_timeout: float = _setting(
        (setting_text.seconds, "seconds, 0 to 1e6"), 120.0,
        "how long to wait for another process that compiles the same kernel before compiling privately",
    )  # fmt: skip
    arches: tuple[str, ...] = _setting(
        (setting_text.arches, "SM targets such as sm_121, separated by ',' or ' '"), (),
        "targets that warm-up compiles for where no GPU is present", "FLASHINFER_CUDA_ARCH_LIST", name="JITMX_ARCH",
    )  # fmt: skip
    jobs: int | None = _setting(
        (setting_text.jobs, f"a number, 1 to {setting_text.MOST_JOBS}"), None,
        "compiles at once; by default as many as cores and memory allow", "FLASHINFER_NVCC_THREADS",
    )  # fmt: skip
    log_level: int = _setting(
        (setting_text.log_level, "0 (silent) to 5 (everything)"), 2,
        "how much jitmx logs, on stderr or as the program says: 1 errors, 2 warnings, 3 information, 4 and 5 debugging",
        "FLASHINFER_LOGLEVEL",
    )  # fmt: skip
    verbose: bool = _setting(
        _FLAG, False, "log every compile with its time and resource use (on stderr, or as the program says)",
        "FLASHINFER_JIT_VERBOSE",
    )  # fmt: skip
    tactics_dir: Path = _setting(  # noqa: RUF009
        _DIRECTORY, lambda: _user_folder("config") / "tactics",
        "tuning tables of your own, <arch>/<family>.json; they come before the shipped ones", name="JITMX_TACTICS",
    )  # fmt: skip
    families: tuple[Path, ...] = _setting(
        (_folders, _DIRECTORIES), (),
        "folders with kernel families of your own (kernels/, templates/, tactics/); their code is loaded",
    )  # fmt: skip
    mxfp4_layers: tuple[tuple[str, str], ...] | None = _setting(
        (setting_text.chosen_layers, "moe, qkv, o, lm_head, separated by ',', each with :mxfp4, or but for moe with "
         ":mxfp8, where that is to be said; or all; or none"),
        None, "layers of a model in vLLM that jitmx serves; by default moe",
    )  # fmt: skip
    draft_layers: tuple[tuple[str, str], ...] = _setting(
        (setting_text.chosen_draft_layers, "qkv, o, gate_up, down, fc, lm_head, separated by ',', each with :mxfp4 or "
         ":mxfp8 where that is to be said; or all; or none"),
        (), "layers of an Eagle3 draft model in vLLM that jitmx quantizes and serves; by default none",
    )  # fmt: skip
    moe_kernel: str = _setting(
        _one_of(*MOE_KERNELS), "auto",
        "experts in vLLM: auto, gemm and gemv are jitmx's; marlin and triton hand the layer back to vLLM",
        "VLLM_MXFP4_MOE_KERNEL",
    )  # fmt: skip
    moe_activation: str = _setting(
        _one_of(*MOE_ACTIVATIONS), "bf16",
        "what the experts' inputs are rounded to in vLLM; with fp8 those of 16 rows an expert and more on sm_90a, of "
        "64 elsewhere",
        "VLLM_MXFP4_ACTIVATION",
    )  # fmt: skip
    linear_activation: str = _setting(
        _one_of(*LINEAR_ACTIVATIONS), "bf16",
        "what the inputs of dense layers that jitmx serves in MXFP4 are rounded to in vLLM, of 256 tokens and more",
    )  # fmt: skip
    fuse_norm: bool = _setting(
        _FLAG, True, "RMSNorm and residual of a block in vLLM go into its products, where all of them are jitmx's"
    )
    all_scales: bool = _setting(
        _FLAG, False,
        "layers in vLLM take kernels for all scales from the start, so that weights loaded again are never refused",
    )  # fmt: skip
    attention: bool | None = _setting(
        (setting_text.switch, "auto, on or off"), None,
        "attention of gpt-oss in vLLM is jitmx's (on) or vLLM's (off); auto: jitmx's beside moe, qkv and o",
        "VLLM_ATTENTION_SINKS", "VLLM_USE_ATTENTION_SINKS",
    )  # fmt: skip
    greedy_sampler: bool = _setting(
        _FLAG, True, "tokens of a batch in vLLM whose requests are all greedy are jitmx's to take, in one launch"
    )
    quantize_qkv: bool | None = _quantizes("qkv")
    quantize_o: bool | None = _quantizes("o")
    quantize_lm_head: bool | None = _quantizes("lm_head")

    def value(self, field: str) -> Any:
        """The value of a setting by its field."""
        return self.overrides[field] if field in self.overrides else getattr(self, field)


def _table() -> Iterator[Setting]:
    """Those of jitmx and of its families, which follow the variable that names more of them."""
    for item in dataclasses.fields(Settings):
        if item.metadata:
            about = dict(item.metadata)
            yield Setting(about.pop("name") or f"JITMX_{item.name.upper()}", item.name, **about)
        if item.name == "families":
            yield from (setting for family in resources.families() for setting in _of_family(family))


TABLE: tuple[Setting, ...] = tuple(_table())
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


# Variables that FlashInfer reads as well, and that may say more of it.
_FLASHINFER: dict[str, Callable[[str], Any]] = {
    "FLASHINFER_CUDA_ARCH_LIST": setting_text.flashinfer_arches,
    "FLASHINFER_LOGLEVEL": setting_text.flashinfer_log_level,
}


def _parsed(setting: Setting, source: str, text: str) -> Any:
    try:
        return _FLASHINFER.get(source, setting.parse)(text)
    except ValueError as error:
        detail = ""
        if isinstance(error, setting_text.Unfit):
            detail, text = f" ({error})", text if error.shown is None else error.shown
        raise SettingError(f"{source}={short(text)} is not {setting.choices}{detail}") from None


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
        usual = setting.default() if callable(setting.default) else setting.default
        values[setting.field] = _parsed(setting, source, text) if text else usual
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
