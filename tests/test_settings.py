"""Settings: every variable and alias is honoured, and one that is wrong is named with its choices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitmx import kernels, layers, resources, setting_text, settings
from jitmx.errors import SettingError
from jitmx.quoting import short
from jitmx.settings import TABLE, Setting, Settings

# For each field, texts and what they are read as; the first differs from the default.
TOY = Path(__file__).parent / "toy"
READ: dict[str, list[tuple[str, Any]]] = {
    "families": [(str(TOY), (TOY,)), (f"{TOY}:", (TOY,))],
    "cache_dir": [("/srv/kernels", Path("/srv/kernels")), ("~/kernels", Path.home() / "kernels")],
    "site_cache": [("/a:/b", (Path("/a"), Path("/b"))), ("/a::", (Path("/a"),)), ("~/c", (Path.home() / "c",))],
    "bundle_keys": [("/etc/jitmx/keys:~/own.pub", (Path("/etc/jitmx/keys"), Path.home() / "own.pub"))],
    "signing_key": [("/etc/jitmx/own.key", Path("/etc/jitmx/own.key"))],
    "remote_cache": [
        ("s3://bucket/jitmx", "s3://bucket/jitmx"),
        ("file:///mnt/share", "file:///mnt/share"),
        ("simplecache::https://kernels.example/v1", "simplecache::https://kernels.example/v1"),
    ],
    "remote_write": [("1", True), ("off", False)],
    "remote_timeout": [("0.5", 0.5), ("600", 600.0)],
    "mode": [("required", "required"), ("OFF", "off"), ("Auto", "auto")],
    "allow_shared_cache": [("1", True), ("Yes", True), ("on", True), ("TRUE", True), ("0", False), ("off", False)],
    "lock_timeout": [("2.5", 2.5), ("0", 0.0), ("1e6", 1e6)],
    "arches": [
        ("sm_121", ("sm_121a",)),
        ("9.0a 12.1a", ("sm_90a", "sm_121a")),
        ("sm_90;sm_120f", ("sm_90a", "sm_120f")),
        ("8.0, 8.6,", ("sm_80", "sm_86")),
    ],
    "jobs": [("3", 3), ("1", 1)],
    "log_level": [("4", 4), ("0", 0), ("5", 5)],
    "verbose": [("1", True), ("no", False), ("true", True)],
    "tactics_dir": [("/srv/tactics", Path("/srv/tactics"))],
    "linear_knobs": [
        ("split_k=8,stages=6", (("split_k", "8"), ("stages", "6"))),
        (" split_k = 8 , ", (("split_k", "8"),)),
    ],
    "linear_tile": [("64x128", "64x128"), (" 64X128x256 ", "64x128x256"), ("16x64x128S4", "16x64x128s4")],
    "moe_knobs": [
        ("tile_m=32,stages=4", (("tile_m", "32"), ("stages", "4"))),
        ("kernel=grouped", (("kernel", "grouped"),)),
    ],
    "moe_tile": [("64x128", "64x128"), ("64X32X128s3", "64x32x128s3")],
    "mxfp4_layers": [
        ("moe,qkv", (("moe", "mxfp4"), ("qkv", "mxfp4"))),
        (" O:MXFP8 , lm_head", (("o", "mxfp8"), ("lm_head", "mxfp4"))),
        ("all", tuple((layer, "mxfp4") for layer in layers.KINDS)),
        ("moe,moe", (("moe", "mxfp4"),)),
        ("none", ()),
    ],
    "draft_layers": [
        ("qkv,FC:mxfp8", (("qkv", "mxfp4"), ("fc", "mxfp8"))),
        ("all:mxfp8", tuple((layer, "mxfp8") for layer in layers.DRAFT_KINDS)),
        ("none", ()),
    ],
    "moe_kernel": [("marlin", "marlin"), ("GEMV", "gemv"), ("auto", "auto")],
    "moe_activation": [("mxfp8", "mxfp8"), ("fp6", "fp6"), ("BF16", "bf16")],
    "linear_activation": [("fp8", "fp8"), ("BF16", "bf16")],
    "fuse_norm": [("off", False), ("1", True)],
    "all_scales": [("on", True), ("0", False)],
    "attention": [("on", True), ("true", True), ("1", True), ("off", False), ("False", False), ("auto", None)],
    "greedy_sampler": [("0", False), ("on", True)],
    "quantize_qkv": [("1", True), ("0", False), ("auto", None)],
    "quantize_o": [("1", True), ("0", False), ("AUTO", None)],
    "quantize_lm_head": [("yes", True), ("0", False), ("auto", None)],
}

# For each field, texts that are refused.
REFUSED: dict[str, list[str]] = {
    "families": ["/a", f"{TOY}:{TOY}", "~nobody-of-that-name"],
    "cache_dir": ["~nobody-of-that-name/kernels"],
    "site_cache": ["/a:~nobody-of-that-name"],
    "bundle_keys": ["/a:~nobody-of-that-name"],
    "signing_key": ["~nobody-of-that-name"],
    "remote_cache": [
        "/mnt/share",
        "s3:",
        "s3://",
        "S3 bucket",
        "s3://a b",
        "s3://" + "a" * 1024,
    ],
    "remote_write": ["auto", "2"],
    "remote_timeout": ["0", "-1", "601", "nan", "inf", "soon"],
    "tactics_dir": ["~nobody-of-that-name"],
    "mode": ["always", "auto,off", "1"],
    "allow_shared_cache": ["maybe", "2"],
    "lock_timeout": ["-1", "nan", "inf", "1000001", "soon", "9" * 5000],
    "arches": ["sm_70", "hopper", "sm_90 sm_999"],
    "jobs": ["0", "-2", "1.5", "all", "4097", "9" * 5000, "-" + "9" * 5000],
    "log_level": ["6", "-1", "debug", "9" * 5000],
    "verbose": ["maybe"],
    "linear_knobs": [
        "split_k",
        "=8",
        "split_k=",
        "split_k=8;stages=6,x",
        "stages=2,stages=3",
        "stages=2, stages=2",
        "k=" + "9" * 65,
    ],
    "linear_tile": ["64", "64x", "64x0", "64x128x", "64x128s", "64x128x1x1", "64*128", "-1x4", "s4", "9" * 5000 + "x1"],
    "moe_knobs": ["tile_m", "=32", "tile_m=", "tile_m=32;stages=4,x", "tile_m=32,tile_m=64"],
    "moe_tile": ["64", "x128", "64x0", "64*128"],
    "mxfp4_layers": ["mlp", "moe:mxfp8", "all:mxfp8", "qkv:int4", "qkv,qkv:mxfp8", "none,moe", ",", "qkv:"],
    "draft_layers": ["moe", "fc:int4", "down,down:mxfp8", "none,fc", ","],
    "moe_kernel": ["cutlass", "auto,gemm", "0"],
    "moe_activation": ["int8", "bfloat16"],
    "linear_activation": ["mxfp8", "e4m3"],
    "fuse_norm": ["auto", "2"],
    "all_scales": ["auto", "full"],
    "attention": ["sinks", "2"],
    "greedy_sampler": ["auto", "2"],
    "quantize_qkv": ["2", "maybe"],
    "quantize_o": ["mxfp4"],
    "quantize_lm_head": ["2"],
}

for _family in resources.families():
    READ.setdefault(f"{_family}_knobs", [("kernel=one,stages=2", (("kernel", "one"), ("stages", "2")))])
    READ.setdefault(f"{_family}_tile", [("64x128", "64x128")])
    REFUSED.setdefault(f"{_family}_knobs", ["stages"])
    REFUSED.setdefault(f"{_family}_tile", ["64"])

NAMES = [(setting, name) for setting in TABLE for name in (setting.name, *setting.aliases)]
IDS = [name for _, name in NAMES]


def test_every_setting_is_covered_here() -> None:
    fields = [item.name for item in dataclasses.fields(Settings) if item.name != "overrides"]
    overrides = [f"{name}_{what}" for name in kernels.families() for what in ("knobs", "tile")]
    assert [setting.field for setting in TABLE if setting.field not in overrides] == fields
    assert [setting.field for setting in TABLE if setting.field not in fields] == overrides
    assert set(READ) == set(REFUSED) == {*fields, *overrides}


def test_names_are_those_that_scripts_already_have() -> None:
    assert all(setting.name.startswith("JITMX_") and setting.help for setting in TABLE)
    assert {alias for setting in TABLE for alias in setting.aliases} == {
        "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_NVCC_THREADS", "FLASHINFER_LOGLEVEL", "FLASHINFER_JIT_VERBOSE",
        "FLASHINFER_MOE_TILE", "VLLM_MXFP4_MOE_KERNEL", "VLLM_MXFP4_ACTIVATION", "VLLM_MXFP4_QUANTIZE_QKV",
        "VLLM_MXFP4_QUANTIZE_O", "VLLM_MXFP4_QUANTIZE_LM_HEAD", "VLLM_ATTENTION_SINKS", "VLLM_USE_ATTENTION_SINKS",
    }  # fmt: skip
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize(("setting", "name"), NAMES, ids=IDS)
def test_each_name_is_honoured_and_said_to_be_where_the_value_came_from(setting: Setting, name: str) -> None:
    default = settings.read({}).value(setting.field)
    for text, value in READ[setting.field]:
        read = settings.read({name: text})
        assert read.value(setting.field) == value
        assert type(read.value(setting.field)) is type(value)
        assert settings.origin(setting.field, {name: text}) == name
        others = {item.field: read.value(item.field) for item in TABLE if item is not setting}
        assert others == {field: settings.read({}).value(field) for field in others}
    assert READ[setting.field][0][1] != default


@pytest.mark.parametrize("setting", [setting for setting in TABLE if setting.aliases], ids=lambda item: item.name)
def test_the_canonical_name_wins_over_its_aliases_even_where_those_are_wrong(setting: Setting) -> None:
    text, value = READ[setting.field][0]
    for alias in setting.aliases:
        for order in ({alias: "??", setting.name: text}, {setting.name: text, alias: "??"}):
            assert settings.read(order).value(setting.field) == value
            assert settings.origin(setting.field, order) == setting.name
        assert settings.origin(setting.field, {setting.name: "", alias: text}) == alias


@pytest.mark.parametrize(("setting", "name"), NAMES, ids=IDS)
def test_an_empty_variable_counts_as_unset(setting: Setting, name: str) -> None:
    assert settings.read({name: ""}) == settings.read({})
    assert settings.origin(setting.field, {name: ""}) == "default"


@pytest.mark.parametrize(
    ("name", "text", "setting"),
    [(name, text, setting) for setting, name in NAMES for text in REFUSED[setting.field]],
)
def test_a_bad_value_is_refused_with_the_variable_the_value_and_the_choices(
    name: str, text: str, setting: Setting
) -> None:
    with pytest.raises(SettingError) as error:
        settings.read({name: text})
    assert str(error.value).startswith(f"{name}={short(text)} is not {setting.choices}")


def test_what_flashinfer_s_own_variables_may_say_of_flashinfer_alone_stops_nobody() -> None:
    built = {"FLASHINFER_CUDA_ARCH_LIST": "7.5 8.0 8.9 9.0a 10.3a 11.0a 12.0f", "FLASHINFER_LOGLEVEL": "10"}
    found = settings.read(built)
    assert found.arches == settings.read({"JITMX_ARCH": "8.0 8.9 9.0a 10.3a 12.0f"}).arches and found.log_level == 5
    assert settings.read({"FLASHINFER_CUDA_ARCH_LIST": "7.5"}).arches == ()


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(SettingError, match=r"JITMX_REMOTE_CACHE='…@host/x' is .*leave credentials to") as raised:
        settings.read({"JITMX_REMOTE_CACHE": "https://me:pass@word@host/x"})
    assert "pass" not in str(raised.value)


def test_an_unknown_target_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(SettingError, match="no kernels for sm_70; the nearest it has is sm_80"):
        settings.read({"JITMX_ARCH": "sm_90 sm_70"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("JITMX_CACHEDIR", "JITMX_CACHE_DIR"),
        ("JITMX_LOGLEVEL", "JITMX_LOG_LEVEL"),
        ("JITMX_ARCHS", "JITMX_ARCH"),
        ("JITMX_LINEAR_KNOB", "JITMX_LINEAR_KNOBS"),
        ("JITMX_JOB", "JITMX_JOBS"),
    ],
)
def test_a_variable_that_does_not_exist_is_answered_with_the_one_that_was_meant(name: str, meant: str) -> None:
    with pytest.raises(SettingError) as error:
        settings.read({name: "1"})
    assert str(error.value) == f"{name} is not a setting of jitmx; did you mean {meant}?"


def test_a_variable_like_no_other_is_answered_with_all_there_are() -> None:
    with pytest.raises(
        SettingError, match="JITMX_QQQQQQQQQQQQ is not a setting of jitmx; known: JITMX_ALLOW_SHARED"
    ) as error:
        settings.read({"JITMX_QQQQQQQQQQQQ": "1"})
    assert all(setting.name in str(error.value) for setting in TABLE)


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: not name.startswith("JITMX_")), st.text(min_size=1)))
def test_variables_of_others_change_nothing(others: dict[str, str]) -> None:
    aliases = {alias for setting in TABLE for alias in setting.aliases}
    assert settings.read({name: text for name, text in others.items() if name not in aliases}) == settings.read({})


@given(name=st.sampled_from(IDS), text=st.text(min_size=1))
def test_any_text_is_either_read_or_refused_by_name(name: str, text: str) -> None:
    try:
        settings.read({name: text})
    except SettingError as error:
        assert str(error).startswith(f"{name}=")


def test_defaults_follow_the_platform() -> None:
    read = settings.read({})
    assert read.cache_dir == Path(platformdirs.user_cache_dir("jitmx"))
    assert read.tactics_dir == Path(platformdirs.user_config_dir("jitmx")) / "tactics"
    assert (read.mode, read.allow_shared_cache, read.lock_timeout) == ("auto", False, 120.0)
    assert (read.arches, read.jobs, read.site_cache, read.families) == ((), None, (), ())
    assert (read.log_level, read.verbose) == (2, False)
    assert set(read.overrides.values()) == {(), None}
    assert (read.mxfp4_layers, read.moe_kernel, read.moe_activation, read.fuse_norm) == (None, "auto", "bf16", True)
    assert read.all_scales is False and read.attention is None
    assert (read.quantize_qkv, read.quantize_o, read.quantize_lm_head) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("moe,qvk", "'qvk' is none of moe, qkv, o, lm_head, all; did you mean qkv?"),
        ("moe:mxfp8", "moe takes mxfp4, not 'mxfp8'"),
        ("all:mxfp8", "moe takes mxfp4, not 'mxfp8'; name the layers one by one"),
        ("o,o:mxfp8", "o is given as mxfp4 and as mxfp8; name it once"),
        (" , ", "no layer is named; to leave all of them to vLLM say none"),
    ],
)
def test_layers_that_cannot_be_are_refused_with_what_is_wrong_with_them(text: str, said: str) -> None:
    with pytest.raises(SettingError) as error:
        settings.read({"JITMX_MXFP4_LAYERS": text})
    assert str(error.value).endswith(f"({said})")


@given(st.integers(1, 999), st.integers(1, 999), st.none() | st.integers(1, 999), st.none() | st.integers(1, 99))
def test_a_tile_is_read_as_it_is_spelled(m: int, n: int, k: int | None, stages: int | None) -> None:
    text = f"{m}x{n}" + ("" if k is None else f"x{k}") + ("" if stages is None else f"s{stages}")
    assert setting_text.tile(settings.read({"JITMX_LINEAR_TILE": text}).value("linear_tile")) == (m, n, k, stages)


def test_the_environment_is_read_once_until_it_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, name in NAMES:
        monkeypatch.delenv(name, raising=False)
    try:
        assert settings.reload().jobs is None
        monkeypatch.setenv("JITMX_JOBS", "7")
        assert settings.current().jobs is None
        assert settings.reload().jobs == settings.current().jobs == 7
        assert settings.origin("jobs") == "JITMX_JOBS"
    finally:
        monkeypatch.undo()
        settings.current.cache_clear()


def test_what_the_program_chose_decides_until_the_environment_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for _, name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JITMX_JOBS", "7")
    try:
        settings.reload()
        assert settings.choose("jobs", 2, "the program").jobs == settings.current().jobs == 2
        assert settings.origin("jobs") == "the program" and settings.origin("mode") == "default"
        assert settings.origin("jobs", {"JITMX_JOBS": "7"}) == "JITMX_JOBS"
        settings.release("jobs")
        assert settings.current().jobs == 7 and settings.origin("jobs") == "JITMX_JOBS"
        settings.choose("jobs", 2, "the program")
        assert settings.reload().jobs == 7 and settings.origin("jobs") == "JITMX_JOBS"
    finally:
        monkeypatch.undo()
        settings.reload()


def test_a_long_value_is_abbreviated_and_a_knob_given_twice_is_named() -> None:
    with pytest.raises(SettingError) as error:
        settings.read({"JITMX_JOBS": "9" * 5000})
    assert str(error.value) == ("JITMX_JOBS='999999999999999999999999'... (5000 characters) is not a number, 1 to 4096")
    with pytest.raises(SettingError, match=r"\('stages' is given twice; give it once\)"):
        settings.read({"JITMX_LINEAR_KNOBS": "stages=2,stages=3"})
    with pytest.raises(SettingError) as unknown:
        settings.read({"JITMX_" + "X" * 5000: "1"})
    assert len(str(unknown.value)) < 1500
