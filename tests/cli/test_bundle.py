"""`jitmx bundle`: made without a GPU, the same everywhere, and enough to serve without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jitmx import settings
from jitmx.cache import bundle, bundle_layer, layout
from jitmx.cache.bundle import Kernel
from jitmx.cache.store import Store
from jitmx.serving import model

Run = Callable[..., Any]
FAMILY = ("--arch", "sm_121", "--family", "sampling")


@pytest.fixture
def place(tmp_path: Path, record: Callable[..., Any]) -> Path:
    """A bundle of two entries."""
    path = tmp_path / "made.jitmx"
    kernels = [Kernel(*record(salt=salt)).undated("0.1.0") for salt in "ab"]
    made = {"jitmx": "0.1.0", "arches": ["sm_121a"], "nvrtc": [{"release": "13.5", "digest": "a" * 64}], "for": {}}
    path.write_bytes(bundle.make(kernels, [], made))
    return path


@pytest.fixture
def pair(run: Run, tmp_path: Path) -> tuple[str, str]:
    run("bundle", "keygen", str(tmp_path / "own"))
    return str(tmp_path / "own.key"), str(tmp_path / "own.pub")


def test_the_same_command_makes_the_same_file_from_a_cold_and_from_a_warm_cache_and_for_everybody(
    process: Callable[..., Any], tmp_path: Path
) -> None:
    made = []
    for number, variables in enumerate(
        [{}, {"LC_ALL": "C", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "1"}, {"JITMX_MODE": "off"}]
    ):
        cache = tmp_path / f"cache{number % 2}"
        target = tmp_path / f"made{number}"
        done = process(
            "bundle", "create", *FAMILY, "-q", "-o", str(target), JITMX_CACHE_DIR=str(cache), **variables
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made.append(target.read_bytes())
    assert made[0] == made[1] == made[2]
    again = process("bundle", "create", *FAMILY, "-o", str(tmp_path / "warm"), JITMX_CACHE_DIR=str(tmp_path / "cache0"))
    assert "hit" in again.stderr and "compiled" not in again.stderr
    assert (tmp_path / "warm").read_bytes() == made[0]


SERVE = """
import json, sys
from jitmx import arch, build
from jitmx.cli.served import ServedModel
from jitmx.toolchain import nvrtc, workers

def refuse(*arguments, **more):
    raise AssertionError("the compiler is called")

nvrtc.identity()
workers.call = nvrtc.compile = nvrtc.scan = refuse
model = ServedModel("gpt-oss-120b", sys.argv[1], 1, 1, False, 1024, 131072, 16, "auto")
built = [build.obtain(variant) for variant in model.variants((arch.parse("sm_121"),), (48,))]
print(json.dumps([[one.status, one.variant.name] for one in built]))
"""


def test_a_bundle_made_without_a_gpu_serves_a_model_in_required_mode_with_no_compile(
    run: Run, read: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "gpt-oss.jitmx"
    asked = ("--model", "gpt-oss-120b", "--layers", "moe", "--tokens", "1", "--arch", "sm_121")
    said = read("bundle", "create", *asked, "-q", "-o", str(path))
    assert said["kernels"] >= 3 and said["made"]["for"]["layers"] == {"moe": "mxfp4"}
    warmed = read("warmup", *asked, "-q")
    assert {one["key"] for one in warmed["kernels"]} == {
        one["key"] for one in read("bundle", "inspect", str(path))["entries"]
    }
    run("bundle", "import", str(path), "--to", str(tmp_path / "imported"))
    for number, where in enumerate(
        [
            {"JITMX_CACHE_DIR": str(tmp_path / "imported")},
            {"JITMX_CACHE_DIR": str(tmp_path / "empty"), "JITMX_SITE_CACHE": str(path)},
        ]
    ):
        environment = os.environ | {"JITMX_MODE": "required"} | where
        done = subprocess.run([sys.executable, "-c", SERVE, "moe"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        statuses = json.loads(done.stdout)
        assert len(statuses) == said["kernels"] and {status for status, _ in statuses} == {"hit"}, number
    lacking = os.environ | {"JITMX_MODE": "required", "JITMX_CACHE_DIR": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", SERVE, "moe"], env=lacking, capture_output=True, text=True)
    assert "NotWarmedError" in done.stderr and "compiler is called" not in done.stderr


def test_warmup_and_bundle_ask_one_function_and_take_the_same_layers(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def of_model(*arguments: Any, **how: Any) -> list[Any]:
        asked.append((arguments, how))
        return []

    monkeypatch.setattr(model, "of_model", of_model)
    how = (
        "--model",
        "gpt-oss-20b",
        "--arch",
        "sm_90",
        "--layers",
        "moe,o:mxfp8",
        "--tokens",
        "7",
        "--ranks",
        "2",
        "-q",
    )
    run("warmup", *how)
    run("bundle", "create", *how, "-o", str(tmp_path / "made"))
    assert len(asked) == 2 and asked[0] == asked[1] and asked[0][0][2] == {"moe": "mxfp4", "o": "mxfp8"}
    for verb in (("warmup",), ("bundle", "create", "-o", str(tmp_path / "x"))):
        assert (
            "none of moe, qkv"
            in run(*verb, "--model", "gpt-oss-20b", "--layers", "mlp", "--arch", "sm_90", code=2).stderr
        )
        assert "--layers says how a model is served" in run(*verb, "--layers", "moe", "--arch", "sm_90", code=2).stderr


def test_the_order_of_layers_and_targets_makes_no_difference(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model, "of_model", lambda *_arguments, **_how: [])
    for name, layers, targets in (("a", "moe,o,qkv", "sm_90,sm_121"), ("b", "qkv,o,moe", "sm_121,sm_90")):
        how = ("--model", "gpt-oss-20b", "--layers", layers, "--arch", targets, "-q", "-o", str(tmp_path / name))
        run("bundle", "create", *how)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_model_with_no_layer_of_jitmx_s_makes_no_bundle_and_warm_up_says_that_nothing_is_asked_for(
    run: Run, read: Callable[..., Any], tmp_path: Path
) -> None:
    how = ("--model", "gpt-oss-20b", "--layers", "none", "--arch", "sm_90", "-q")
    said = run("bundle", "create", *how, "-o", str(tmp_path / "made"), code=2).stderr
    assert "a bundle of nothing is not written: no layer of the model" in said and not (tmp_path / "made").exists()
    assert "nothing is asked for: no layer of the model is to be jitmx's; name some by" in run("warmup", *how).stderr
    assert read("warmup", *how)["kernels"] == []


def test_gpus_that_are_here_make_no_difference_and_other_cards_are_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from jitmx.cli import targets

    asked: list[Any] = []
    monkeypatch.setattr(targets, "default_variants", lambda *arguments: asked.append(arguments) or [])
    monkeypatch.setattr(targets, "multiprocessors", lambda _target: [78])
    run("bundle", "create", *FAMILY, "-q", "-o", str(tmp_path / "a"))
    run(
        "bundle",
        "create",
        *FAMILY,
        "-q",
        "-o",
        str(tmp_path / "b"),
        "--multiprocessors",
        "20",
        "--multiprocessors",
        "48",
    )
    assert [arguments[2] for arguments in asked] == [(48,), (20, 48)]
    assert bundle.open_(tmp_path / "b").made["for"]["multiprocessors"] == {"sm_121a": [20, 48]}


def test_a_kernel_that_fails_leaves_no_file(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from jitmx.errors import CompileError, ContractError
    from jitmx.toolchain import nvrtc

    (tmp_path / "made").write_text("there before")

    def fail(*_arguments: Any, **_more: Any) -> Any:
        raise CompileError("no such type")

    monkeypatch.setattr(nvrtc, "compile", fail)
    said = run("bundle", "create", *FAMILY, "-q", "-o", str(tmp_path / "made"), code=3).stderr
    assert "no such type" in said and "made is not written" in said
    assert (tmp_path / "made").read_text() == "there before"
    monkeypatch.undo()
    from jitmx import build

    def breach(*_arguments: Any, **_more: Any) -> Any:
        raise ContractError("it spills")

    monkeypatch.setattr(build, "hold", breach)
    monkeypatch.setenv("JITMX_CACHE_DIR", str(tmp_path / "cache"))
    settings.reload()
    run("bundle", "create", *FAMILY, "-q", "-o", str(tmp_path / "made"), code=1)
    assert (tmp_path / "made").read_text() == "there before"


@pytest.mark.parametrize("verb", ["create", "sign", "keygen"])
@pytest.mark.parametrize(
    ("name", "why"), [("no/x", "No such file or directory"), ("made.jitmx/x", "Not a directory"), ("x" * 300, "long")]
)
def test_a_target_that_cannot_be_written_is_a_usage_error_before_anything_is_built(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path, pair: tuple[str, str],
    verb: str, name: str, why: str,
) -> None:  # fmt: skip
    from jitmx import batch

    monkeypatch.setattr(batch, "build_all", lambda *_arguments, **_how: pytest.fail("it builds"))
    before = sorted(tmp_path.iterdir())
    target = str(tmp_path / name)
    words = {
        "create": (*FAMILY, "-q", "-o", target),
        "sign": (str(place), "--key", pair[0], "-o", target),
        "keygen": (target,),
    }[verb]
    remedy = "take another name" if verb == "keygen" else "name another file by -o"
    said = run("bundle", verb, *words, code=2).stderr
    assert f"Error: {target}" in said and "cannot be written: " in said and why in said and remedy in said
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [("create", *FAMILY, "-o", ""), ("create", *FAMILY, "-o", "x", "--key", ""), ("sign", "", "--key", "x"),
     ("sign", "x", "--key", ""), ("sign", "x", "--key", "x", "-o", ""), ("keygen", ""), ("import", ""),
     ("import", "x", "--to", ""), ("inspect", ""), ("verify", ""), ("verify", "x", "--keys", "")],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_path_is_a_usage_error_and_does_not_mean_the_current_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "a path is empty; give one" in run("bundle", *words, code=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_and_a_link_or_a_pipe_is_written_through(
    run: Run, place: Path, pair: tuple[str, str], tmp_path: Path
) -> None:
    for words in (("sign", str(place), "--key", pair[0]), ("create", *FAMILY, "-q")):
        said = run("bundle", *words, "-o", str(tmp_path), code=2).stderr
        assert f"{tmp_path} cannot be written: Is a directory; name another file by -o" in said
    (tmp_path / "link").symlink_to("target")
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link", "fifo"):
        run("bundle", "sign", str(place), "--key", pair[0], "-o", str(tmp_path / name))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "fifo").is_fifo()
    with os.fdopen(reader, "rb") as stream:
        assert stream.read() == (tmp_path / "target").read_bytes()
    assert bundle.open_(tmp_path / "link").signers


def test_signing_verifying_and_importing_by_keys(
    run: Run, read: Callable[..., Any], place: Path, pair: tuple[str, str], tmp_path: Path, monkeypatch: Any
) -> None:
    private, public = pair
    assert Path(private).stat().st_mode & 0o777 == 0o600
    assert "signed by nobody" in run("bundle", "verify", str(place), "--keys", public, code=1).stderr
    run("bundle", "import", str(place), "--keys", public, code=1)
    assert not (tmp_path / "cache").exists()
    place.chmod(0o640)
    said = read("bundle", "sign", str(place), "--key", private)
    assert len(said["signed_by"]) == 1 and place.stat().st_mode & 0o777 == 0o640
    assert read("bundle", "verify", str(place), "--keys", public)["sound"] is True
    monkeypatch.setenv("JITMX_BUNDLE_KEYS", public)
    settings.reload()
    assert ", as required" in run("bundle", "verify", str(place)).stdout
    done = read("bundle", "import", str(place))
    assert len(done["added"]) == 2 and done["kept"] == []
    assert "0 kernels came in, 2 were there" in run("bundle", "import", str(place)).stdout
    assert run("cache", "verify").stdout == "2 records, 2 objects: 0 findings\n"
    run("bundle", "keygen", str(tmp_path / "other"))
    assert "only by" in run("bundle", "verify", str(place), "--keys", str(tmp_path / "other.pub"), code=1).stderr
    assert "is there already" in run("bundle", "keygen", str(tmp_path / "own"), code=2).stderr
    said = run("bundle", "sign", str(place), "--key", str(tmp_path / "x"), code=2).stderr
    assert "there is no private key" in said and "make a pair: jitmx bundle keygen" in said


def test_what_a_bundle_says_is_shown_escaped(run: Run, read: Callable[..., Any], place: Path, record: Any) -> None:
    said = run("bundle", "inspect", str(place)).stdout
    assert "NVRTC 13.5 (aaaaaaaaaaaa)" in said and "not signed" in said and said.count("linear.gemv") == 2
    entries = read("bundle", "inspect", str(place))["entries"]
    assert [one["registers"] for one in entries] == [40, 40]
    asked = {"families": ["bandwidth", "norm"], "multiprocessors": {"sm_121a": [48, 20]}, "lora": False, "draft": None}
    place.write_bytes(bundle.make([Kernel(*record())], [], {"jitmx": "0.1.0", "for": asked}))
    lines = [" ".join(line.split()) for line in run("bundle", "inspect", str(place)).stdout.splitlines()]
    told = ["families bandwidth,norm", "multiprocessors sm_121a=48,20", "lora false", "draft none"]
    assert [line for line in told if line not in lines] == []
    odd = {"jitmx": ["x"], "nvrtc": [1, {"release": 5}], "arches": "all", "for": [1]}
    place.write_bytes(bundle.make([Kernel(*record())], [], odd))
    assert "Traceback" not in run("bundle", "inspect", str(place)).output


def test_files_that_are_no_bundles_are_errors_in_a_line(run: Run, tmp_path: Path, place: Path) -> None:
    (tmp_path / "text").write_text("no bundle")
    flipped = bytearray(place.read_bytes())
    flipped[-11_000] ^= 1
    (tmp_path / "flipped").write_bytes(flipped)
    (tmp_path / "cut").write_bytes(place.read_bytes()[:-5_000])
    for name in ("absent", "text", "flipped", "cut", "."):
        for verb in ("verify", "import"):
            said = run("bundle", verb, str(tmp_path / name), code=1).stderr
            remedy = "name a file that is there" if name in ("absent", ".") else "copy it again from where it is sound"
            assert "Error: the bundle" in said and remedy in said
    assert not (tmp_path / "cache").exists()


def test_bundles_of_wheels_are_listed_and_imported_by_name(
    run: Run, read: Callable[..., Any], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read("bundle", "list") == {"schema_version": 1, "bundles": []}
    info = tmp_path / "site" / "acme-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{bundle_layer.GROUP}]\ngpt = acme\nbad = acme\n")
    (tmp_path / "site" / "acme").mkdir()
    shutil.copy(place, tmp_path / "site" / "acme" / "gpt.jitmx")
    monkeypatch.syspath_prepend(tmp_path / "site")
    rows = {row["name"]: row for row in read("bundle", "list", code=1)["bundles"]}
    assert rows["acme:gpt"]["kernels"] == 2 and "cannot be read" in rows["acme:bad"]["fault"]
    assert "2 kernels came in" in run("bundle", "import", "acme:gpt", "--to", str(tmp_path / "to")).stdout
    assert len(list(Store(tmp_path / "to").records())) == 2


def test_entries_of_a_bundle_are_shown_as_such(
    run: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITMX_SITE_CACHE", str(place))
    settings.reload()
    key = bundle.open_(place).of("record")[0]
    shown = run("cache", "show", key).stdout
    assert f"within the bundle {place}" in shown and "for a bundle (which tells no date)" in shown
    assert "lies within the bundle" in run("cache", "path", key, code=1).stderr
    assert "compiled for a bundle (which tells no date)" in run("cache", "why", key).stdout
    assert f"site cache {place}: 2 entries" in run("cache", "stats").stdout
    run("bundle", "import", str(place))
    assert run("cache", "path", key).stdout.strip().startswith(str(tmp_path / "cache" / layout.VERSION))
