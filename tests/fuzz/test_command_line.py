"""Whatever it is given, a command ends in one of its exit codes, and says why in a line instead of a traceback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import fuzz_inputs as inputs
import fuzz_world
from fuzz_world import ARCH, World
from jitmx import resources
from jitmx.cache import archive, bundle
from jitmx.cache.archive import Archive, Memory
from jitmx.cache.bundle import Kernel
from jitmx.cache.store import Store
from jitmx.dispatch import tune
from jitmx.dispatch.journal import Journal
from jitmx.errors import TacticError
from jitmx.kernels.linear import TUNING, LinearProblem


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with fuzz_world.made() as found:
        yield found


def command_lines(world: World, data: st.DataObject) -> None:
    # A cache of its own: it may be pruned.
    with world.cache() as place:
        world.run(data.draw(inputs.arguments()), {"JITMX_CACHE_DIR": str(place)})


_READERS = st.sampled_from(
    [
        ("env",), ("env", "--json"), ("doctor",), ("explain", "linear", "--arch", ARCH), ("explain", "moe"),
        ("explain", "--json", "linear", "--arch", "sm_90"), ("cache", "ls"), ("cache", "--json", "stats"),
        ("cache", "path"), ("cache", "verify"), ("cache", "prune", "--dry-run"), ("variants", "--family", "quantize"),
        fuzz_world.SEED, ("tune", "linear", "--model", "gpt-oss-20b"),
        ("warmup", "-q", "--arch", "sm_90", "--family", "routing"), ("warmup", "--model", "gpt-oss-20b", "-q"),
    ]
)  # fmt: skip


def settings(world: World, data: st.DataObject) -> None:
    world.run(data.draw(_READERS), data.draw(inputs.SETTINGS))


TABLED = "sm_90a"  # a target with a table of each family
_ENTRY = ("quantize.quantize", "--arch", ARCH)
_OVER_THE_CACHE = st.sampled_from(
    [
        ("cache", "ls"), ("cache", "ls", "--json"), ("cache", "show", *_ENTRY), ("cache", "show", "--json", *_ENTRY),
        ("cache", "why", *_ENTRY), ("cache", "why", "--json", *_ENTRY), ("cache", "path", *_ENTRY), ("cache", "stats"),
        ("cache", "verify", "--json"), ("cache", "verify", "--repair"), ("cache", "prune", "--age", "1s"),
        ("cache", "prune", "--unreachable"), ("cache", "verify", "-q", "--recompile"),
        ("variants", "--arch", ARCH, "--family", "quantize"), fuzz_world.SEED, (*fuzz_world.SEED, "--json"),
    ]
)  # fmt: skip


def _over(world: World, data: st.DataObject, kind: str, spoil: Callable[[bytes], st.SearchStrategy[bytes]]) -> None:
    """Spoil one file of a kind in a cache, and run verbs over what is left."""
    with world.cache() as place:
        path = data.draw(st.sampled_from(sorted(place.glob(kind))))
        path.write_bytes(data.draw(spoil(path.read_bytes())))
        for arguments in data.draw(st.lists(_OVER_THE_CACHE, min_size=1, max_size=3)):
            world.run(arguments, {"JITMX_CACHE_DIR": str(place)})


def records(world: World, data: st.DataObject) -> None:
    _over(world, data, "v1/actions/*.json", inputs.documents)


def scans(world: World, data: st.DataObject) -> None:
    _over(world, data, "v1/scans/*.json", inputs.documents)


def toolchains(world: World, data: st.DataObject) -> None:
    _over(world, data, "toolchain.json", inputs.documents)


def machine_code(world: World, data: st.DataObject) -> None:
    _over(world, data, data.draw(st.sampled_from(["v1/objects/*/*.cubin", "v1/sources/*.cu"])), inputs.spoilt)


def ledgers(world: World, data: st.DataObject) -> None:
    shipped = json.loads((resources.directory("tactics") / "ledger.json").read_bytes())
    own = json.dumps(shipped | {"entries": shipped["entries"][:2]}).encode()
    with world.cache() as place:
        (place / "ledger.json").write_bytes(data.draw(inputs.documents(own)))
        verb = data.draw(st.sampled_from(["variants", "verify"]))
        arguments = (verb, "--arch", ARCH, "--family", "quantize", *data.draw(st.sampled_from([(), ("--json",)])))
        world.run(arguments, {"JITMX_CACHE_DIR": str(place)})


def tables(world: World, data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["linear", "moe"]))
    table = json.loads((resources.directory("tactics") / TABLED / f"{family}.json").read_bytes())
    spoilt = data.draw(inputs.documents(json.dumps(table | {"rows": table["rows"][:3]}).encode()))
    with world.cache() as place:
        path = place / TABLED / f"{family}.json"
        path.parent.mkdir()
        path.write_bytes(spoilt)
        shape = ("-m", data.draw(st.sampled_from(["1", "64", "4096"])))
        variables = {"JITMX_TACTICS": str(place), "JITMX_CACHE_DIR": str(place)}
        world.run(("explain", family, "--arch", TABLED, *shape), variables)
        world.run(("explain", "--json", family, "--arch", TABLED, *shape), variables)


_OVER_A_BUNDLE = st.sampled_from(
    [
        ("bundle", "verify", "--json"), ("bundle", "inspect", "--json"), ("bundle", "inspect"), ("bundle", "import"),
        ("bundle", "sign", "--key", "text"), ("bundle", "import", "--keys", "folder"),
    ]
)  # fmt: skip
_BESIDE_A_BUNDLE = st.sampled_from([("bundle", "list"), ("bundle", "list", "--json"), ("cache", "ls"), fuzz_world.SEED])


@st.composite
def _bundles(draw: st.DrawFn, place: Path) -> bytes:
    """A bundle of the cache's kernel: with spoilt bytes, or whole with odd members in its list, sealed."""
    store = Store(place)
    (record,) = store.records()
    entry, source = store.lookup(record.key), store.source(record.inputs["source_digest"])
    assert entry is not None and source is not None
    data = bundle.make([Kernel(record, entry.image, source)], [], {"jitmx": "1", "arches": ["sm_90a"], "nvrtc": []})
    if draw(st.booleans()):
        return draw(inputs.spoilt(data))
    opened = Archive(Memory(data))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = [(one.name, tar.extractfile(one).read()) for one in tar.getmembers()[1:]]  # type: ignore[union-attr]
    return archive.pack(draw(inputs.documents(opened.manifest)), members, draw(st.sampled_from([None, b"{}"])))


def bundles(world: World, data: st.DataObject) -> None:
    with world.cache() as place:
        path = place / "made.jitmx"
        path.write_bytes(data.draw(_bundles(place)))
        variables = {"JITMX_CACHE_DIR": str(place)}
        world.run((*data.draw(_OVER_A_BUNDLE), str(path)), variables)
        world.run(data.draw(_BESIDE_A_BUNDLE), variables | {"JITMX_SITE_CACHE": str(path)})


_TASK = tune.Task(LinearProblem(4, 64, 64), {"m": 1})
_CANDIDATE = tune.Candidate("gemv", {"stages": 2}, ())


def journals(world: World, data: st.DataObject) -> None:
    about = {"family": "linear"}
    with world.cache() as place:
        path = place / "table.journal"
        with Journal(path, about) as journal:
            journal.timed(_TASK.key, _CANDIDATE.key, 4.5)
            journal.timed_again(_TASK.key, _CANDIDATE.key, 4.25)
            row = {"kernel": "gemv", "knobs": {}, "us": 4.25, "spread": 0.0, "stable": True, "tried": 1, "failed": 0}
            journal.finished(_TASK.key, row)
        lines = path.read_bytes().splitlines(keepends=True)
        at = data.draw(st.integers(0, len(lines) - 1))
        lines[at] = data.draw(inputs.documents(lines[at])) + b"\n"
        path.write_bytes(b"".join(lines))
        try:
            with Journal(path, about) as journal:
                journal.export(place / "timings")
                for task, kept in journal.rows.items():
                    assert tune.row(tune.Outcome(_TASK, **kept), TUNING) and task
        except TacticError as error:
            assert str(path) in str(error)


_CHEAP = st.one_of(
    st.sampled_from(
        [("env",), ("--help",), ("--version",), ("explain", "linear", "--arch", ARCH), (*fuzz_world.SEED, "--json")]
    ),
    inputs.arguments().filter(lambda words: words[0] in ("env", "cache", "explain") and "--recompile" not in words),
)
_ENCODINGS = st.sampled_from([{}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
_ENDS = st.sampled_from(["pipe", "closed", "/dev/full", "/dev/null"])


def processes(world: World, data: st.DataObject) -> None:
    arguments = [word for word in data.draw(_CHEAP) if len(word) < 10_000]
    out, err = data.draw(_ENDS), data.draw(_ENDS)
    closing = [f"{number}>&-" for number, end in ((1, out), (2, err)) if end == "closed"]
    closing += ["<&-"] if data.draw(st.booleans()) else ["</dev/null"]
    variables = data.draw(_ENCODINGS)
    streams: dict[str, Any] = {}
    for name, end in (("stdout", out), ("stderr", err)):
        streams[name] = subprocess.PIPE if end in ("pipe", "closed") else os.open(end, os.O_WRONLY)
    try:
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {" ".join(closing)}', "sh", sys.executable, "-m", "jitmx.cli", *arguments],
            env=os.environ | {"JITMX_CACHE_DIR": str(world.seed)} | variables, timeout=120, check=False, **streams,
        )  # fmt: skip
    finally:
        for stream in streams.values():
            if stream != subprocess.PIPE:
                os.close(stream)
    said = [(part or b"").decode("utf-8", "backslashreplace") for part in (done.stdout, done.stderr)]
    assert done.returncode in fuzz_world.CODES, (arguments, done)
    assert "Traceback" not in "".join(said) and "Exception ignored" not in said[1], (arguments, done)
    if out == "pipe" and err == "pipe":
        fuzz_world.check(arguments, done.returncode, *said)


# 20,000 cases in a night.
CASES = {
    command_lines: 8_000, settings: 4_000, records: 3_000, scans: 800, toolchains: 500, machine_code: 500,
    ledgers: 900, tables: 1_500, journals: 500, processes: 300, bundles: 800,
}  # fmt: skip
EVERY = pytest.mark.parametrize("holds", CASES, ids=lambda holds: holds.__name__)


def _try(holds: Callable[[World, st.DataObject], None], world: World, cases: int) -> None:
    @hypothesis.settings(
        max_examples=cases, deadline=None, print_blob=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(st.data())
    def test(data: st.DataObject) -> None:
        holds(world, data)

    test()


@EVERY
def test_whatever_comes_in_a_command_ends_as_commands_do(holds, world: World) -> None:
    _try(holds, world, 8 if holds is processes else 30)


@pytest.mark.nightly
@pytest.mark.timeout(6 * 3600)
@EVERY
def test_whatever_comes_in_all_night_a_command_ends_as_commands_do(holds, world: World) -> None:
    _try(holds, world, CASES[holds])


def test_a_night_has_twenty_thousand_cases() -> None:
    assert sum(CASES.values()) >= 20_000
