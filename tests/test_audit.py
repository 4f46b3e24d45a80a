"""What an entry would be made from now."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jitmx import audit, build, kernels
from jitmx.cache import store as stores
from jitmx.cache.layout import object_
from jitmx.cache.manifest import Record
from jitmx.cache.prune import prune
from jitmx.cache.verify import verify
from jitmx.cache.why import explain
from jitmx.errors import CompileError, ToolchainError
from jitmx.toolchain import nvrtc


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_variant_of_a_record_is_the_one_that_was_built(probe: Any) -> None:
    variant = probe.variant("sm_90a", factor=9, half=True)
    assert audit.variant_of(build.obtain(variant).record) == variant


def test_a_record_whose_kernel_or_knobs_are_gone_has_no_variant(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = build.obtain(probe.variant()).record
    for gone in (
        dataclasses.replace(record, family="gone"),
        dataclasses.replace(record, kernel="gone"),
        dataclasses.replace(record, arch="sm_42"),
        dataclasses.replace(record, knobs={**record.knobs, "factor": 13}),
        dataclasses.replace(record, knobs={**record.knobs, "gone": 1}),
    ):
        assert audit.variant_of(gone) is None
        assert not audit.is_reachable(gone)
    without = dataclasses.replace(probe.module.FAMILY, kernels=())
    monkeypatch.setattr(kernels, "families", lambda: {"probe": without})
    assert audit.variant_of(record) is None


def test_why_tells_a_current_entry_from_a_stale_one(probe: Any) -> None:
    old = build.obtain(probe.variant()).record
    assert explain(old, [old], present=audit.subject(probe.variant()))[-1].startswith("It is current")
    edit(probe.header, "x * factor", "x + factor")
    probe.next_process()
    assert explain(old, [old], present=audit.subject(probe.variant()))[-1] == (
        "It is stale, and its next use compiles it again: header jitmx/probe.cuh changed."
    )
    new = build.obtain(probe.variant()).record
    store = stores.current()
    assert explain(new, store.records(), source_of=store.source)[1].endswith(
        "what changed: header jitmx/probe.cuh changed."
    )


def test_why_counts_the_lines_of_a_changed_template(probe: Any) -> None:
    old = build.obtain(probe.variant()).record
    edit(probe.template, "if (i < n) x[i]", "if (i >= n) return;\n    x[i]")
    new = build.obtain(probe.variant()).record
    store = stores.current()
    assert explain(new, store.records(), source_of=store.source)[1].endswith(
        "what changed: template source changed (2 lines added, 1 removed, the first at line 20)."
    )
    assert new.key != old.key


def why_changed(new: Record) -> str:
    store = stores.current()
    return explain(new, store.records(), source_of=store.source, render=audit.render_again)[1].rpartition(
        "what changed: "
    )[2]


def test_why_names_a_knob_and_a_changed_template_both(probe: Any) -> None:
    build.obtain(probe.variant(factor=2))
    edit(probe.template, "if (i < n) x[i]", "if (i >= n) return;\n    x[i]")
    new = build.obtain(probe.variant(factor=3)).record
    assert why_changed(new) == "knob factor 2 → 3; template source changed."


def test_why_names_the_knob_alone_where_the_template_is_what_it_was(probe: Any) -> None:
    build.obtain(probe.variant(factor=2))
    new = build.obtain(probe.variant(factor=3)).record
    assert why_changed(new) == "knob factor 2 → 3."
    other = build.obtain(probe.variant("sm_90a", factor=3)).record
    assert "template" not in why_changed(other)


def test_why_tells_a_template_that_changed_between_two_entries_before_it_changed_again(probe: Any) -> None:
    build.obtain(probe.variant(factor=2))
    same = build.obtain(probe.variant(factor=3)).record
    edit(probe.template, "{% if half %}", "// edited\n{% if half %}")
    assert why_changed(same) == "knob factor 2 → 3.", "the lines that differ are those of the knob"
    store = stores.current()
    for path in (probe.cache / "v1" / "sources").iterdir():
        path.unlink()
    assert why_changed(same) == "knob factor 2 → 3; whether the template source changed too is not known."
    assert list(store.records())


def test_why_does_not_claim_what_a_template_did_that_no_longer_renders(probe: Any) -> None:
    build.obtain(probe.variant(factor=2))
    new = build.obtain(probe.variant(factor=3)).record
    probe.template.write_text("{{ no_such_knob }}")
    assert why_changed(new) == "knob factor 2 → 3; whether the template source changed too is not known."


def test_why_calls_an_entry_current_only_where_a_look_up_finds_it(probe: Any) -> None:
    record = build.obtain(probe.variant()).record
    store = stores.current()
    path = object_(probe.cache, record.outputs["object"])
    image = path.read_bytes()

    def last() -> str:
        present = audit.subject(probe.variant())
        return explain(record, [record], present=present, sound=store.holds(record.key))[-1]

    assert last() == "It is current: a look-up now finds it."
    for damage in (image + b"\0", image[:-1], image[:-1] + bytes([image[-1] ^ 1]), None):
        path.unlink() if damage is None else path.write_bytes(damage)
        assert last() == "Its machine code is missing or damaged, and its next use compiles it again."


def test_pruning_by_reach_takes_what_an_edit_left_behind_and_nothing_else(probe: Any) -> None:
    old = build.obtain(probe.variant()).key
    other = build.obtain(probe.variant(half=True)).key
    edit(probe.template, "{% if half %}", "{% if half %}\n// edited")
    assert {audit.is_reachable(record) for record in stores.current().records()} == {True, False}
    prune(stores.current(), reachable=audit.is_reachable)
    assert [record.key for record in stores.current().records()] == [old] != [other]


def test_an_entry_whose_template_no_longer_renders_or_parses_is_unreachable(probe: Any) -> None:
    record = build.obtain(probe.variant()).record
    good = probe.template.read_text()
    for bad in ("{{ no_such_knob }}", "{% if %}", "this is no CUDA"):
        probe.template.write_text(bad)
        assert not audit.is_reachable(record)
    probe.template.write_text(good)
    assert audit.is_reachable(record)


def test_without_a_compiler_nothing_is_called_unreachable(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = build.obtain(probe.variant()).record

    def missing() -> Any:
        raise ToolchainError("NVRTC is not installed")

    monkeypatch.setattr(nvrtc, "identity", missing)
    with pytest.raises(ToolchainError):
        prune(stores.current(), reachable=audit.is_reachable)
    assert list(stores.current().records()) == [record]


def test_an_entry_for_a_target_beyond_this_nvrtc_is_reachable(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = build.obtain(probe.variant()).record
    older = dataclasses.replace(nvrtc.identity(), version="12.3")
    monkeypatch.setattr(nvrtc, "identity", lambda: older)
    assert audit.is_reachable(record)


def test_compiling_again_gives_the_same_bytes(probe: Any) -> None:
    for target in ("sm_90a", "sm_121a"):
        build.obtain(probe.variant(target, half=True))
    report = verify(stores.current(), recompile=audit.recompile)
    assert (report.findings, report.recompiled, report.skipped) == ((), 2, 0)


def test_compiling_again_finds_an_entry_that_was_forged(probe: Any) -> None:
    built = build.obtain(probe.variant())
    other = build.obtain(probe.variant(factor=3))
    store = stores.current()
    forged = {**built.record.outputs, "object": other.record.outputs["object"]}
    source = store.source(built.record.inputs["source_digest"])
    assert source is not None
    store.publish(dataclasses.replace(built.record, outputs=forged), other.image, source)
    assert store.lookup(built.key).image == other.image, "digests alone cannot tell"
    report = verify(store, recompile=audit.recompile, repair=True)
    assert [finding.kind for finding in report.findings] == ["unreproducible"]
    assert build.obtain(probe.variant()).image == built.image
    assert object_(probe.cache, built.record.outputs["object"]).exists()


def test_an_entry_of_another_compiler_or_of_other_headers_is_not_compared(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = build.obtain(probe.variant()).record
    source = build.key_inputs(probe.variant())[1]
    assert audit.recompile(record, source) is not None
    edit(probe.header, "#pragma once", "#pragma once\n// edited")
    probe.next_process()
    assert audit.recompile(record, source) is None
    edit(probe.header, "#pragma once\n// edited", "#pragma once")
    probe.next_process()
    other = dataclasses.replace(nvrtc.identity(), digest="0" * 64)
    monkeypatch.setattr(nvrtc, "identity", lambda: other)
    assert audit.recompile(record, source) is None


def test_compiling_something_else_again_shows_in_key_or_error(probe: Any) -> None:
    built = build.obtain(probe.variant())
    again = audit.recompile(built.record, build.key_inputs(probe.variant(factor=3))[1])
    assert again is not None and again.key != built.key
    with pytest.raises(CompileError):
        audit.recompile(built.record, "this is no CUDA")


def test_an_unmet_contract_shows_in_verify(probe: Any) -> None:
    build.obtain(probe.variant(registers=1))
    findings = verify(stores.current()).findings
    assert [finding.kind for finding in findings] == ["unmet-contract"]
    assert "registers a thread, over the 1 promised" in findings[0].what
