"""`jitmx cache`: entries are found by name or key, shown whole, checked, mended and pruned."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jitmx.cache import layout
from jitmx.cache.manifest import Record
from jitmx.cache.store import Store

MakeEntry = Callable[..., tuple[Record, bytes, str]]


@pytest.fixture
def cache(tmp_path: Path) -> Store:
    """The cache that the verbs look into, empty."""
    return Store(tmp_path / "cache")


@pytest.fixture
def three(cache: Store, record: MakeEntry) -> dict[str, Record]:
    """Two kernels, one of them for two targets."""
    made = {}
    for name, arch in (("linear.gemv", "sm_121a"), ("linear.gemv", "sm_90a"), ("quantize.encode", "sm_90a")):
        entry = record(name, arch)
        assert cache.publish(*entry)
        made[f"{name} {arch}"] = entry[0]
    return made


def test_an_empty_cache_says_how_to_fill_it_and_is_no_error(run, read) -> None:
    result = run("cache", "ls")
    assert result.stdout == "" and "jitmx warmup" in result.stderr
    assert read("cache", "ls")["entries"] == []


def test_a_list_that_a_filter_empties_does_not_say_that_the_cache_is_empty(run, three) -> None:
    said = run("cache", "ls", "--arch", "sm_80", "--family", "nope").stderr
    assert said == "none of 3 entries is for sm_80 and nope; without --arch and --family all are listed\n"


def test_entries_are_listed_with_resources_and_filtered_by_target_and_family(run, read, three) -> None:
    entries = read("cache", "ls")["entries"]
    assert {(entry["name"], entry["arch"], entry["key"]) for entry in entries} == {
        (item.name, item.arch, item.key) for item in three.values()
    }
    assert {(entry["registers"], entry["spill_bytes"], entry["shared_bytes"]) for entry in entries} == {(40, 0, 1024)}
    assert [entry["arch"] for entry in read("cache", "ls", "--arch", "sm_121")["entries"]] == ["sm_121a"]
    assert [entry["name"] for entry in read("cache", "ls", "--family", "quantize")["entries"]] == ["quantize.encode"]
    assert len(read("cache", "ls", "--arch", "sm_90,sm_121")["entries"]) == 3
    lines = run("cache", "ls").stdout.splitlines()
    assert len(lines) == 4 and all(item.key[:12] in "\n".join(lines) for item in three.values())


def test_an_entry_is_found_by_name_and_by_as_much_of_its_key_as_is_unique(read, three) -> None:
    wanted = three["quantize.encode sm_90a"]
    others = [item.key for item in three.values() if item is not wanted]
    unique = next(wanted.key[:n] for n in range(1, 65) if not any(key.startswith(wanted.key[:n]) for key in others))
    for name in ("quantize.encode", wanted.key, wanted.key[:12], unique):
        assert read("cache", "show", name)["record"]["key"] == wanted.key


def test_a_name_of_several_targets_asks_for_the_target_and_lists_the_keys(run, read, three) -> None:
    said = run("cache", "show", "linear.gemv", code=2).stderr
    assert "--arch" in said and all(three[f"linear.gemv {arch}"].key[:12] in said for arch in ("sm_121a", "sm_90a"))
    assert read("cache", "show", "linear.gemv", "--arch", "sm_90")["record"]["arch"] == "sm_90a"


def test_a_name_means_the_latest_of_its_variant_s_entries_and_a_key_that_one(read, cache, record) -> None:
    old, new = record(salt="old", created=1000.0), record(salt="new", created=2000.0)
    cache.publish(*new)
    cache.publish(*old)
    assert read("cache", "show", "linear.gemv")["record"]["key"] == new[0].key
    assert read("cache", "show", old[0].key[:12])["record"]["key"] == old[0].key


def test_a_name_that_only_other_targets_have_is_said_to_be_theirs(run, three) -> None:
    said = run("cache", "path", "quantize.encode", "--arch", "sm_121", code=2).stderr
    wanted = "no entry has the name or key 'quantize.encode' for sm_121a; there is one for sm_90a: name that by --arch"
    assert wanted in said and "did you mean" not in said


def test_an_arch_that_is_given_is_not_asked_for(run, cache, record, three) -> None:
    cache.publish(*record("linear.wgmma", "sm_90a"))
    said = run("cache", "show", "linear", "--arch", "sm_90", code=2).stderr
    assert "'linear' names 2 entries; give one's key:" in said and "--arch" not in said


@pytest.mark.parametrize("verb", ["show", "why", "path"])
def test_a_name_of_nothing_is_a_usage_error_that_says_where_to_look(run, three, verb) -> None:
    assert "`jitmx cache ls` lists all" in run("cache", verb, "no.such", code=2).stderr
    assert "did you mean 'quantize.encode'?" in run("cache", verb, "quantise.encode", code=2).stderr
    assert "for sm_80" in run("cache", verb, "quantize.encode", "--arch", "sm_80", code=2).stderr


def test_show_prints_everything_and_where_the_files_are(run, read, cache, three) -> None:
    wanted = three["quantize.encode sm_90a"]
    said = read("cache", "show", "quantize.encode")
    assert Path(said["object_path"]).read_bytes() == b"image of quantize.encode sm_90a "
    assert Path(said["source_path"]).read_text() == "// quantize.encode sm_90a \n"
    assert said["record"] == json.loads(json.dumps(wanted.as_dict()))
    shown = run("cache", "show", "quantize.encode").stdout
    for part in (wanted.key, "m=1 bias=false", "40 registers", "jitmx/mxfp4.cuh", "NVRTC 13.5", said["source_path"]):
        assert part in shown


def test_show_of_damaged_machine_code_is_a_finding(run, cache, three) -> None:
    path = layout.object_(cache.root, three["quantize.encode sm_90a"].outputs["object"])
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert "damaged or gone" in run("cache", "show", "quantize.encode", code=1).stdout
    assert "verify --repair" in run("cache", "path", "quantize.encode", code=1).stderr


def test_path_prints_the_directory_or_the_file_of_an_entry(run, read, cache, three) -> None:
    assert run("cache", "path").stdout == f"{cache.root}\n"
    assert Path(run("cache", "path", "quantize.encode").stdout.strip()).read_bytes().startswith(b"image of quantize")
    assert read("cache", "path")["path"] == str(cache.root)


def test_why_names_what_changed_since_the_predecessor(run, read, cache, record) -> None:
    old, image, source = record(salt="old", created=1000.0)
    old.inputs["nvrtc"] = "13.0"
    new = record(salt="new", created=2000.0)[0]
    new = replace(
        new, knobs={"m": 4, "bias": False}, inputs={**new.inputs, "source_digest": old.inputs["source_digest"]}
    )
    new = replace(new, outputs={**new.outputs, "object": old.outputs["object"]})
    cache.publish(old, image, source)
    cache.publish(new, image, source)
    said = read("cache", "why", new.key)
    assert said["predecessor"] == old.key
    assert said["changed"] == ["knob m 1 → 4", "header jitmx/mxfp4.cuh changed", "NVRTC 13.0 → 13.5"]
    assert not said["current"]
    assert "knob m 1 → 4; header jitmx/mxfp4.cuh changed; NVRTC 13.0 → 13.5" in run("cache", "why", new.key).stdout


def test_why_of_an_entry_without_its_machine_code_says_that_it_is_compiled_again(run, read) -> None:
    run("warmup", "-q", "--arch", "sm_90", "--variant", "quantize.quantize")
    assert read("cache", "why", "quantize.quantize")["current"]
    path = Path(read("cache", "path", "quantize.quantize")["path"])
    path.write_bytes(path.read_bytes() + b"\0")
    said = read("cache", "why", "quantize.quantize")
    assert not said["current"] and not said["sound"] and said["changed_since"] == []
    assert "missing or damaged, and its next use compiles it again" in run("cache", "why", "quantize.quantize").stdout


@pytest.mark.parametrize("part", ["actions", "objects", "sources", "scans"])
def test_a_file_of_a_terabyte_stops_no_verb_and_repair_mends_it(run, read, tmp_path: Path, part: str) -> None:
    warmup = ("warmup", "-q", "--arch", "sm_90", "--variant", "quantize.quantize")
    run(*warmup)
    path = next(path for path in (tmp_path / "cache" / "v1" / part).rglob("*") if path.is_file())
    os.truncate(path, 1 << 40)
    for verb in (("ls",), ("stats",), ("prune", "--age", "30d")):
        read("cache", *verb)
    assert "larger than" in run("cache", "verify", code=1).stdout
    assert read("cache", "verify", "--repair")["mended"] and not path.exists()
    run(*warmup)
    assert read("cache", "verify")["findings"] == [] and len(read("cache", "ls")["entries"]) == 1


def test_a_folder_that_others_can_write_is_told_by_every_verb_alike(run, cache, three) -> None:
    (cache.root / "v1" / "objects").chmod(0o777)
    said = {run("cache", verb, code=1).stderr for verb in ("ls", "stats", "verify", "prune")}
    said.add(run("warmup", "-q", "--arch", "sm_90", "--variant", "quantize.quantize", code=1).stderr)
    assert len(said) == 1 and "v1/objects can be written by others" in said.pop()


def test_why_of_a_kernel_that_is_no_more_says_so(run, read, cache, record) -> None:
    cache.publish(*record("linear.former"))
    said = read("cache", "why", "linear.former")
    assert not said["current"] and "no kernel linear.former" in said["obstacle"]
    assert "does not compile it any more" in run("cache", "why", "linear.former").stdout


def test_verify_is_quiet_on_a_sound_cache(run, read, three) -> None:
    assert read("cache", "verify")["findings"] == []
    assert run("cache", "verify").stdout == "3 records, 3 objects: 0 findings\n"


def test_verify_finds_damage_exits_1_and_repair_mends_it(run, read, cache, three) -> None:
    broken = three["quantize.encode sm_90a"]
    path = layout.object_(cache.root, broken.outputs["object"])
    path.write_bytes(b"x" + path.read_bytes()[1:])
    said = run("cache", "verify", code=1)
    assert str(path) in said.stdout and "--repair" in said.stderr
    kinds = {finding["kind"] for finding in read("cache", "verify", code=1)["findings"]}
    assert kinds == {"corrupt-object", "dangling-record"}
    mended = read("cache", "verify", "--repair")
    assert mended["mended"] == len(mended["findings"]) == 2
    assert run("cache", "verify").stdout == "2 records, 2 objects: 0 findings\n"
    assert len(read("cache", "ls")["entries"]) == 2


def test_an_unmet_contract_is_a_finding_that_repair_leaves(read, cache, record) -> None:
    entry, image, source = record()
    entry.outputs["breaches"] = ["8 B a thread spilled to local memory, over the 0 promised"]
    cache.publish(entry, image, source)
    for arguments in (("cache", "verify"), ("cache", "verify", "--repair")):
        found = read(*arguments, code=1)["findings"]
        assert [finding["kind"] for finding in found] == ["unmet-contract"]
        assert "8 B a thread spilled" in found[0]["what"]


def used(cache: Store, entry: Record, days_ago: float) -> None:
    then = time.time() - days_ago * 86_400
    os.utime(layout.action(cache.root, entry.key), (then, then))


def test_prune_by_age_removes_what_was_not_used_for_so_long(run, read, cache, three) -> None:
    used(cache, three["linear.gemv sm_90a"], 40)
    used(cache, three["quantize.encode sm_90a"], 20)
    assert "would remove 1 entries" in run("cache", "prune", "--age", "30d", "--dry-run").stdout
    assert len(read("cache", "ls")["entries"]) == 3
    said = read("cache", "prune", "--age", "30d")
    assert (said["entries"], said["refused"]) == (1, [])
    assert [item["name"] for item in said["removed"] if item["kind"] == "record"] == ["linear.gemv"]
    assert not any(Path(item["path"]).exists() for item in said["removed"])
    assert len(read("cache", "ls")["entries"]) == 2


def test_prune_by_size_removes_the_least_recently_used_first(read, cache, three) -> None:
    for days, name in enumerate(three):
        used(cache, three[name], 1 + days)
    total = read("cache", "stats")["bytes"]
    read("cache", "prune", "--size", str(total - 1))
    assert [entry["name"] for entry in read("cache", "ls")["entries"]] == ["linear.gemv", "linear.gemv"]
    assert read("cache", "prune", "--size", "0")["kept"] == 0
    assert read("cache", "ls")["entries"] == []


def test_prune_by_target_leaves_the_others(read, three) -> None:
    assert read("cache", "prune", "--arch", "sm_90")["entries"] == 2
    assert [entry["arch"] for entry in read("cache", "ls")["entries"]] == ["sm_121a"]


@pytest.mark.parametrize("how", [("--dry-run",), ()])
def test_prune_tells_entries_of_one_name_apart_by_key_and_target(run, three, how: tuple[str, ...]) -> None:
    lines = run("cache", "prune", "--unreachable", *how).stdout.splitlines()[:-1]
    said = {line.partition(": unreachable")[0] for line in lines}
    assert said == {f"{one.key[:12]}  {one.name}  {one.arch}" for one in three.values()}


def test_prune_unreachable_removes_what_no_call_would_find(read, three) -> None:
    assert read("cache", "prune", "--unreachable")["entries"] == 3


def test_stats_count_entries_by_target_and_family(run, read, three) -> None:
    said = read("cache", "stats")
    assert said["entries"] == {
        "count": 3, "by_family": {"linear": 2, "quantize": 1}, "by_arch": {"sm_121a": 1, "sm_90a": 2}
    }  # fmt: skip
    assert said["bytes"] == sum(kind["bytes"] for kind in said["files"].values())
    assert "3 entries" in run("cache", "stats").stdout


def test_a_site_cache_is_listed_and_left_alone_by_prune(read, monkeypatch, tmp_path: Path, record) -> None:
    site = Store(tmp_path / "site")
    site.publish(*record())
    monkeypatch.setenv("JITMX_SITE_CACHE", str(tmp_path / "site"))
    assert [entry["cache"] for entry in read("cache", "ls")["entries"]] == [str(tmp_path / "site")]
    assert read("cache", "prune", "--size", "0")["removed"] == []
    assert len(read("cache", "ls")["entries"]) == 1


def test_a_cache_that_others_can_write_is_refused_with_the_remedy(run, cache, three) -> None:
    cache.root.chmod(0o777)
    for verb in (("ls",), ("stats",), ("verify",), ("prune",)):
        said = run("cache", *verb, code=1).stderr
        assert "can be written by others" in said and "JITMX_ALLOW_SHARED_CACHE=1" in said
