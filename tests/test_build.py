"""From a variant to machine code within one process: what is a hit, what is not, and what is said about it."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jitmx import batch, build
from jitmx.batch import Failed
from jitmx.build import Built
from jitmx.cache import layout
from jitmx.cache import store as stores
from jitmx.cache.store import Store
from jitmx.errors import (
    ArchError,
    CacheError,
    CompileError,
    ContractError,
    NotWarmedError,
    RenderError,
    ToolchainError,
)
from jitmx.registry.contract import Contract
from jitmx.toolchain import cubin, headers, nvrtc


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The source of each compile that NVRTC really made."""
    done: list[str] = []
    really = nvrtc.compile

    def compile(source: str, options: Any, **more: Any) -> Any:
        done.append(source)
        return really(source, options, **more)

    monkeypatch.setattr(nvrtc, "compile", compile)
    yield done


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def key(probe: Any, **knobs: Any) -> str:
    return build.key_inputs(probe.variant(**knobs))[0].key


# Hits.


def test_the_first_call_compiles_and_the_next_process_finds_it(probe: Any, compiles: list[str]) -> None:
    first = build.obtain(probe.variant(factor=7))
    assert first.status == "compiled" and first.milliseconds > 0
    probe.next_process()
    second = build.obtain(probe.variant(factor=7))
    assert second.status == "hit"
    assert (second.image, second.key, second.record) == (first.image, first.key, first.record)
    assert len(compiles) == 1


def test_the_record_says_what_went_in_and_what_came_out(probe: Any) -> None:
    built = build.obtain(probe.variant("sm_90a", factor=7))
    record, identity = built.record, nvrtc.identity()
    inputs, source = build.key_inputs(built.variant)
    assert built.key == record.key == inputs.key
    assert record.inputs == build.named(inputs)
    assert list(record.inputs["headers"]) == ["jitmx/probe.cuh"]
    assert (record.inputs["nvrtc"], record.inputs["nvrtc_digest"]) == (identity.version, identity.digest)
    assert (record.name, record.arch, record.entry) == ("probe.scale.factor7", "sm_90a", "probe_scale")
    assert record.knobs == {"factor": 7, "registers": 255, "half": False}
    info = cubin.read(built.image).kernel("probe_scale")
    assert record.outputs["registers"] == info.registers > 0
    assert record.outputs["size"] == len(built.image)
    assert record.outputs["entries"] == ["probe_scale"]
    assert stores.current().source(record.inputs["source_digest"]) == source
    assert abs(record.created - time.time()) < 60


def test_a_hit_takes_neither_compiler_nor_disassembler(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build.obtain(probe.variant(half=True), strict=True)
    probe.next_process()
    for module, name in ((nvrtc, "compile"), (nvrtc, "scan"), (cubin, "sass"), (cubin, "read")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name, **more: pytest.fail(f"{name} was called"))
    for strict in (False, True):
        assert build.obtain(probe.variant(half=True), strict=strict).status == "hit"


def test_a_target_with_another_suffix_is_another_kernel(probe: Any) -> None:
    keys = {build.obtain(probe.variant(target)).key for target in ("sm_120a", "sm_120f", "sm_121a", "sm_90a")}
    assert len(keys) == 4


# Stale hits: whatever shapes the code changes the key.


def test_an_edited_header_is_a_new_key(probe: Any, compiles: list[str]) -> None:
    before = build.obtain(probe.variant())
    edit(probe.header, "x * factor", "x + factor")
    probe.next_process()
    after = build.obtain(probe.variant())
    assert after.key != before.key and after.image != before.image
    edit(probe.header, "x + factor", "x * factor")
    probe.next_process()
    again = build.obtain(probe.variant())
    assert (again.status, again.key, again.image) == ("hit", before.key, before.image)
    assert len(compiles) == 2


def test_an_edit_of_a_header_that_a_header_includes_is_a_new_key(probe: Any) -> None:
    inner = probe.header.with_name("inner.cuh")
    inner.write_text("#define OFFSET 1\n")
    edit(probe.header, "#pragma once", '#pragma once\n#include "inner.cuh"')
    edit(probe.header, "x * factor", "x * factor + OFFSET")
    before = build.obtain(probe.variant())
    assert "jitmx/inner.cuh" in before.record.inputs["headers"]
    inner.write_text("#define OFFSET 2\n")
    probe.next_process()
    after = build.obtain(probe.variant())
    assert (after.status, after.key == before.key, after.image == before.image) == ("compiled", False, False)


def test_a_changed_cuda_header_is_a_new_key(probe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(probe, half=True)
    without = key(probe)
    path = next(root for root in headers.pool().places() if (root / "cuda_fp16.h").is_file())
    changed = tmp_path / "cuda"
    changed.mkdir()
    text = (path / "cuda_fp16.h").read_text()
    (changed / "cuda_fp16.h").write_text(text + "\n// changed\n")
    pool = headers.HeaderPool(cuda=(changed, *headers.pool().places()[1:]))
    monkeypatch.setattr(headers, "pool", lambda: pool)
    assert key(probe, half=True) != before
    assert key(probe) == without, "which does not include it"


def test_a_header_that_takes_the_place_of_another_is_a_new_key(probe: Any) -> None:
    edit(probe.header, "#pragma once", '#pragma once\n#include "cuda_fp16.h"')
    before = build.key_inputs(probe.variant())[0]
    assert "cuda_fp16.h" in before.headers
    probe.header.with_name("cuda_fp16.h").write_text("// ours\n")
    probe.next_process()
    after = build.key_inputs(probe.variant())[0]
    assert "jitmx/cuda_fp16.h" in after.headers and "cuda_fp16.h" not in after.headers
    assert after.key != before.key


def test_an_edited_template_is_a_new_key_within_the_process(probe: Any) -> None:
    before = build.obtain(probe.variant())
    edit(probe.template, "if (i < n) x[i] =", "if (i < n) x[i] = 1 +")
    os.utime(probe.template, (1, 1))
    after = build.obtain(probe.variant())
    assert (after.status, after.key == before.key, after.image == before.image) == ("compiled", False, False)


def test_a_changed_option_is_a_new_key(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(probe)
    really = nvrtc.options
    monkeypatch.setattr(nvrtc, "options", lambda arch: (*really(arch), "-DNDEBUG"))
    assert key(probe) != before


@pytest.mark.parametrize("change", [{"digest": "0" * 64}, {"version": "13.999"}])
def test_another_nvrtc_is_a_new_key(probe: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]) -> None:
    before = build.obtain(probe.variant())
    other = dataclasses.replace(nvrtc.identity(), **change)
    monkeypatch.setattr(nvrtc, "identity", lambda: other)
    assert key(probe) != before.key
    assert build.obtain(probe.variant()).status == "compiled"


def test_every_knob_reaches_the_key(probe: Any) -> None:
    keys = {key(probe, **knobs) for knobs in ({}, {"factor": 3}, {"half": True}, {"registers": 64})}
    assert len(keys) == 4


# False misses: whatever does not shape the code does not change the key.


@pytest.mark.parametrize("change", ["mtimes", "PATH", "user", "clock", "working directory", "locale"])
def test_what_does_not_shape_the_code_is_still_a_hit(
    probe: Any, compiles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = build.obtain(probe.variant())
    probe.next_process()
    match change:
        case "mtimes":
            for path in (*probe.templates.rglob("*"), *probe.cache.rglob("*")):
                os.utime(path, (4e9, 4e9))
        case "PATH":
            monkeypatch.setenv("PATH", "/nowhere:/usr/bin/")
            monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda-99")
        case "user":
            monkeypatch.setenv("HOME", str(tmp_path / "somebody"))
            monkeypatch.setenv("USER", "somebody")
            monkeypatch.setenv("LOGNAME", "somebody")
        case "clock":
            monkeypatch.setattr(time, "time", lambda: 1.0)
        case "working directory":
            monkeypatch.chdir(tmp_path)
        case "locale":
            monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    after = build.obtain(probe.variant())
    assert (after.status, after.key, after.image) == ("hit", before.key, before.image)
    assert len(compiles) == 1


def test_an_edit_of_a_header_that_is_not_included_is_still_a_hit(probe: Any, compiles: list[str]) -> None:
    before = build.obtain(probe.variant())
    probe.header.with_name("unrelated.cuh").write_text("// new\n")
    probe.next_process()
    assert build.obtain(probe.variant()).key == before.key
    assert len(compiles) == 1


def test_the_order_of_building_does_not_matter(probe: Any, compiles: list[str]) -> None:
    factors = [2, 3, 4]
    keys = {factor: build.obtain(probe.variant(factor=factor)).key for factor in factors}
    probe.next_process()
    assert {factor: build.obtain(probe.variant(factor=factor)).key for factor in reversed(factors)} == keys
    assert len(compiles) == 3


def test_kernels_that_compile_to_the_same_code_share_it(probe: Any) -> None:
    one = build.obtain(probe.variant(registers=255))
    other = build.obtain(probe.variant(registers=254))
    assert one.key != other.key and one.image == other.image
    assert len(list(probe.cache.rglob("*.cubin"))) == 1


# Damage.


@pytest.mark.parametrize("part", ["record", "object"])
def test_a_flipped_byte_is_a_miss_and_is_rebuilt(probe: Any, compiles: list[str], part: str) -> None:
    first = build.obtain(probe.variant())
    digest = first.record.outputs["object"]
    path = layout.action(probe.cache, first.key) if part == "record" else layout.object_(probe.cache, digest)
    good = path.read_bytes()
    for turn, position in enumerate(range(0, len(good), len(good) // 8)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
        probe.next_process()
        again = build.obtain(probe.variant())
        assert (again.status, again.image, len(compiles)) == ("compiled", first.image, turn + 2)
        probe.next_process()
        assert build.obtain(probe.variant()).status == "hit"


def test_a_damaged_scan_is_made_again(probe: Any, compiles: list[str]) -> None:
    build.obtain(probe.variant())
    for path in probe.cache.rglob("scans/*"):
        path.write_bytes(b"damaged")
    probe.next_process()
    assert build.obtain(probe.variant()).status == "hit"


# Sources by what they are rendered from.


def test_a_kernel_that_is_there_is_found_without_rendering_it(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.obtain(probe.variant())
    probe.next_process()
    with monkeypatch.context() as patched:
        patched.setattr(build, "render", lambda variant: pytest.fail("a template was rendered"))
        again = build.obtain(probe.variant())
    assert (again.status, again.key, again.image) == ("hit", first.key, first.image)
    for path in probe.cache.rglob("sources/*"):
        path.write_text("damaged")
    probe.next_process()
    assert build.obtain(probe.variant()).key == first.key


def test_many_kernels_that_are_there_are_looked_up_in_the_thread_that_asks(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [probe.variant(factor=factor) for factor in (2, 3, 5)]
    for one in (asked[0], asked[2]):
        build.obtain(one)
    compiled: list[str] = []
    attempt = batch._attempt
    monkeypatch.setattr(batch, "_attempt", lambda *given: (compiled.append(given[1].name), attempt(*given))[1])
    found = batch.build_all(asked, strict=False)
    assert [each.status for each in found if isinstance(each, Built)] == ["hit", "compiled", "hit"]
    assert compiled == [asked[1].name]


@pytest.mark.parametrize("back", [False, True])
def test_what_a_template_was_counts_for_no_other_text_of_it(probe: Any, back: bool) -> None:
    before, text = build.obtain(probe.variant()), probe.template.read_text()
    probe.next_process()
    edit(probe.template, "if (i < n) x[i] =", "if (i < n) x[i] = 1 +")
    after = build.obtain(probe.variant())
    assert (after.status, after.key == before.key) == ("compiled", False)
    if back:
        probe.template.write_text(text)
    again = build.obtain(probe.variant())
    assert (again.status, again.key) == ("hit", before.key if back else after.key)


def test_an_edit_while_a_kernel_is_looked_for_leaves_no_source_under_another_texts_name(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, rendered = probe.template.read_text(), Store.rendered

    def edited(store: Store, digest: str) -> str | None:
        edit(probe.template, "if (i < n) x[i] =", "if (i < n) x[i] = 1 +")
        return rendered(store, digest)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "rendered", edited)
        other = build.obtain(probe.variant())
    probe.template.write_text(text)
    again = build.obtain(probe.variant())
    assert (again.status, again.key == other.key) == ("compiled", False)
    assert "1 +" not in build.key_inputs(probe.variant())[1]


def test_mode_required_remembers_no_source(probe: Any) -> None:
    build.obtain(probe.variant())
    known = sorted(probe.cache.rglob("scans/*"))
    for path in known:
        path.unlink()
    store = build.kernel_store()
    inputs, source = build.key_inputs(probe.variant())
    store.keep_scan(build.scan_digest(source, inputs.options), inputs.headers, build.named(inputs)["source_digest"])
    kept = sorted(probe.cache.rglob("scans/*"))
    probe.set(JITMX_MODE="required")
    assert build.obtain(probe.variant()).status == "hit"
    assert sorted(probe.cache.rglob("scans/*")) == kept and len(kept) == 1 and len(known) == 2


# Modes.


def test_mode_required_never_compiles_and_names_the_command(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.set(JITMX_MODE="required")
    monkeypatch.setattr(nvrtc, "scan", lambda *arguments, **more: pytest.fail("the compiler was called"))
    with pytest.raises(NotWarmedError) as caught:
        build.obtain(probe.variant(factor=5))
    said = str(caught.value)
    assert "probe.scale.factor5 for sm_121a is not in the kernel cache" in said
    assert "JITMX_MODE=required" in said
    assert said.endswith(": jitmx warmup --arch sm_121a --variant probe.scale factor=5")
    assert compiles == []


def test_mode_required_serves_what_was_warmed_up(probe: Any, compiles: list[str]) -> None:
    probe.set(JITMX_MODE="required")
    assert build.obtain(probe.variant(), allow_compile=True).status == "compiled"
    assert build.obtain(probe.variant()).status == "hit"
    assert len(compiles) == 1


def test_mode_required_says_what_changed_since_the_warm_up(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build.obtain(probe.variant())
    other = dataclasses.replace(nvrtc.identity(), version="13.999", digest="0" * 64)
    edit(probe.header, "x * factor", "x + factor")
    probe.set(JITMX_MODE="required")
    with pytest.raises(NotWarmedError, match="is not in the kernel cache"):
        build.obtain(probe.variant())
    build.key_inputs(probe.variant())
    with pytest.raises(NotWarmedError, match=r"since changed: header jitmx/probe.cuh changed\)"):
        build.obtain(probe.variant())
    monkeypatch.setattr(nvrtc, "identity", lambda: other)
    build.key_inputs(probe.variant())
    with pytest.raises(NotWarmedError, match=r"header jitmx/probe.cuh changed; NVRTC .* → 13.999\)"):
        build.obtain(probe.variant())


@pytest.mark.parametrize("damage", ["gone", "longer"])
def test_mode_required_says_that_only_the_machine_code_is_missing(probe: Any, damage: str) -> None:
    record = build.obtain(probe.variant()).record
    path = layout.object_(probe.cache, record.outputs["object"])
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes() + b"x")
    probe.set(JITMX_MODE="required")
    with pytest.raises(NotWarmedError, match=r"machine code is missing or damaged\)") as raised:
        build.obtain(probe.variant())
    assert "since changed" not in str(raised.value)


def test_compiling_may_be_forbidden_in_mode_auto_too(probe: Any, compiles: list[str]) -> None:
    with pytest.raises(NotWarmedError, match="JITMX_MODE=auto"):
        build.obtain(probe.variant(), allow_compile=False)
    assert compiles == []


def test_mode_off_leaves_the_disk_alone_and_compiles_once_a_process(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_memory_only", stores.Store(None))
    probe.set(JITMX_MODE="off")
    first = build.obtain(probe.variant())
    second = build.obtain(probe.variant())
    assert (first.status, second.status, first.image) == ("compiled", "hit", second.image)
    assert len(compiles) == 1
    edit(probe.template, "if (i < n)", "if (i < n && ) {")
    with pytest.raises(CompileError, match="is not kept"):
        build.obtain(probe.variant())
    assert not probe.cache.exists()


def test_mode_off_does_not_read_the_disk_either(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_memory_only", stores.Store(None))
    build.obtain(probe.variant())
    probe.set(JITMX_MODE="off")
    assert build.obtain(probe.variant()).status == "compiled"
    assert len(compiles) == 2


# No compiler at hand.


def no_nvrtc() -> Any:
    raise ToolchainError("NVRTC is not installed; pip install nvidia-cuda-nvrtc")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_without_a_compiler_what_any_nvrtc_made_of_the_same_source_serves(
    probe: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    first = build.obtain(probe.variant())
    probe.set(JITMX_MODE=mode)
    monkeypatch.setattr(nvrtc, "identity", no_nvrtc)
    served = build.obtain(probe.variant())
    assert (served.status, served.key, served.image) == ("hit", first.key, first.image)


def test_without_compiler_and_cuda_headers_what_is_cached_serves_but_not_without_our_own_headers(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.obtain(probe.variant(half=True))
    assert "cuda_fp16.h" in first.record.inputs["headers"]
    monkeypatch.setattr(nvrtc, "identity", no_nvrtc)
    pool = headers.HeaderPool(cuda=())
    monkeypatch.setattr(headers, "pool", lambda: pool)
    assert build.obtain(probe.variant(half=True)).image == first.image
    probe.header.unlink()
    pool = headers.HeaderPool(cuda=())
    with pytest.raises(ToolchainError, match="NVRTC is not installed"):
        build.obtain(probe.variant(half=True))


def test_without_a_compiler_a_miss_says_what_is_missing(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    build.obtain(probe.variant())
    monkeypatch.setattr(nvrtc, "identity", no_nvrtc)
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvrtc"):
        build.obtain(probe.variant(factor=3))
    edit(probe.header, "x * factor", "x + factor")
    probe.next_process()
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvrtc"):
        build.obtain(probe.variant())
    probe.set(JITMX_MODE="required")
    with pytest.raises(NotWarmedError, match="jitmx warmup"):
        build.obtain(probe.variant())


def test_mode_required_serves_what_another_nvrtc_made(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.obtain(probe.variant())
    other = dataclasses.replace(nvrtc.identity(), version="13.999", digest="0" * 64)
    monkeypatch.setattr(nvrtc, "identity", lambda: other)
    probe.set(JITMX_MODE="required")
    assert build.obtain(probe.variant()).key == first.key
    probe.set(JITMX_MODE="auto")
    assert build.obtain(probe.variant()).key != first.key, "where compiling is allowed, code is of the NVRTC at hand"
    assert len(compiles) == 2


def test_a_target_beyond_this_nvrtc_is_served_from_the_cache_and_else_refused(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.obtain(probe.variant())
    older = dataclasses.replace(nvrtc.identity(), version="12.3", digest="0" * 64)
    monkeypatch.setattr(nvrtc, "identity", lambda: older)
    assert build.obtain(probe.variant()).image == first.image
    with pytest.raises(ArchError, match=r"sm_121a needs NVRTC 12\.9"):
        build.obtain(probe.variant(factor=3))


# Failures.


def test_a_source_that_does_not_compile_is_kept_and_does_not_block_the_next_try(probe: Any) -> None:
    good = probe.template.read_text()
    edit(probe.template, "if (i < n)", "if (i < nn)")
    for _ in range(2):
        with pytest.raises(CompileError, match="nn") as caught:
            build.obtain(probe.variant(factor=3))
        path = Path(caught.value.source_path or "")
        assert path.parent == probe.cache / "v1" / "failed"
        assert path.name.startswith("probe.scale.factor3-")
        assert "if (i < nn)" in path.read_text()
        assert str(path) in str(caught.value)
    probe.template.write_text(good)
    assert build.obtain(probe.variant(factor=3)).status == "compiled"


def test_an_error_that_only_code_generation_finds_is_kept_too(probe: Any) -> None:
    edit(probe.template, "if (i < n) x[i]", 'asm volatile("no_such_instruction;"); if (i < n) x[i]')
    with pytest.raises(CompileError) as caught:
        build.obtain(probe.variant())
    assert "no_such_instruction" in Path(caught.value.source_path or "").read_text()
    assert not list(probe.cache.rglob("*.cubin"))


def test_a_kernel_without_its_entry_is_an_error_and_is_not_kept(probe: Any) -> None:
    edit(probe.template, "void probe_scale(", "void renamed(")
    with pytest.raises(ToolchainError, match=r"probe_scale.*renamed"):
        build.obtain(probe.variant())
    assert not list(probe.cache.rglob("actions/*"))


def test_a_template_that_does_not_render_is_an_error_before_anything_else(probe: Any, compiles: list[str]) -> None:
    edit(probe.template, "factor", "facto")
    with pytest.raises(RenderError, match="facto"):
        build.obtain(probe.variant())
    assert compiles == [] and not probe.cache.exists()


def test_a_cache_that_others_can_write_is_refused_with_the_remedy(probe: Any) -> None:
    probe.cache.mkdir()
    probe.cache.chmod(0o777)
    probe.next_process()
    with pytest.raises(CacheError, match="JITMX_ALLOW_SHARED_CACHE=1"):
        build.obtain(probe.variant())
    probe.set(JITMX_ALLOW_SHARED_CACHE="1")
    assert build.obtain(probe.variant()).status == "compiled"


# Contracts.


def test_a_breach_is_an_error_where_it_matters_and_takes_no_second_compile(probe: Any, compiles: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(ContractError, match=r"probe.scale.registers1 for sm_121a .*registers a thread, over the 1"):
            build.obtain(probe.variant(registers=1), strict=True)
    assert len(compiles) == 1


def test_a_breach_does_not_stop_serving(probe: Any, caplog: pytest.LogCaptureFixture) -> None:
    built = build.obtain(probe.variant(registers=1))
    assert built.status == "compiled" and len(built.breaches) == 1
    again = build.obtain(probe.variant(registers=1))
    assert again.status == "hit" and again.breaches == built.breaches
    assert len(warnings(caplog)) == 1 and "breaks its contract" in warnings(caplog)[0]


def change_contract(probe: Any, monkeypatch: pytest.MonkeyPatch, contract: Contract) -> Any:
    spec = dataclasses.replace(probe.module.SCALE, contract=lambda knobs, arch: contract)
    monkeypatch.setattr(probe.module, "SCALE", spec)
    return probe.variant()


def test_every_breach_is_named(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    promise = Contract(max_registers=2, require=("QMMA",), forbid=("EXIT",))
    with pytest.raises(ContractError, match=r"over the 2 promised; no instruction matches 'QMMA'; .*EXIT.* ruled out"):
        build.obtain(change_contract(probe, monkeypatch, promise), strict=True)


def test_a_contract_that_changed_is_checked_again_without_a_compile(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.obtain(probe.variant(), strict=True).breaches == ()
    variant = change_contract(probe, monkeypatch, Contract(forbid=("EXIT",)))
    with pytest.raises(ContractError, match="EXIT"):
        build.obtain(variant, strict=True)
    probe.next_process()
    assert "EXIT" in build.obtain(variant).breaches[0], "the record says so now"
    assert build.obtain(change_contract(probe, monkeypatch, Contract()), strict=True).breaches == ()
    assert len(compiles) == 1


def test_only_a_strict_call_disassembles(probe: Any, monkeypatch: pytest.MonkeyPatch, compiles: list[str]) -> None:
    really, calls = cubin.sass, []

    def sass(image: bytes) -> list[str]:
        calls.append(image)
        return really(image)

    monkeypatch.setattr(cubin, "sass", sass)
    assert build.obtain(probe.variant()).record.outputs["contract"] == {}
    assert calls == []
    for _ in range(2):
        assert build.obtain(probe.variant(), strict=True).record.outputs["contract"]["require"]
    assert len(calls) == len(compiles) == 1


def test_without_a_disassembler_kernels_serve_and_only_the_check_fails(
    probe: Any, monkeypatch: pytest.MonkeyPatch, compiles: list[str]
) -> None:
    def sass(image: bytes) -> list[str]:
        raise ToolchainError("nvdisasm is missing; pip install nvidia-cuda-nvdisasm")

    monkeypatch.setattr(cubin, "sass", sass)
    for _ in range(2):
        with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
            build.obtain(probe.variant(), strict=True)
    assert build.obtain(probe.variant()).status == "hit"
    assert len(compiles) == 1


def test_a_strict_call_keeps_a_source_that_was_lost(probe: Any) -> None:
    built = build.obtain(probe.variant(), strict=True)
    path = layout.source(probe.cache, built.record.inputs["source_digest"])
    path.unlink()
    build.obtain(probe.variant(), strict=True)
    assert path.exists()


# Many at once.


def test_results_come_in_the_order_of_the_variants_with_failures_among_them(probe: Any) -> None:
    edit(probe.template, "if (i < n)", "{% if factor == 3 %} error {% endif %}\n    if (i < n)")
    variants = [probe.variant(factor=factor) for factor in (2, 3, 4)] + [probe.variant(registers=1)]
    told: list[tuple[str, int]] = []
    results = batch.build_all(
        variants, jobs=2, on_result=lambda result: told.append((result.variant.name, threading.get_ident()))
    )
    assert [result.variant for result in results] == variants
    assert [type(result) for result in results] == [Built, Failed, Built, Failed]
    assert isinstance(results[1].error, CompileError) and isinstance(results[3].error, ContractError)
    assert sorted(told) == sorted((variant.name, threading.get_ident()) for variant in variants)


def test_a_variant_asked_for_twice_is_compiled_once(probe: Any, compiles: list[str]) -> None:
    results = batch.build_all([probe.variant(factor=5)] * 6, jobs=6)
    assert [result.status for result in results].count("compiled") == len(compiles) == 1


@pytest.fixture
def disassembled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many cubins each run of nvdisasm from now on takes."""
    really, sizes = cubin.sass_of, []

    def sass_of(images: list[bytes], target: str) -> list[list[str]]:
        sizes.append(len(images))
        return really(images, target)

    def sass(image: bytes) -> list[str]:
        raise AssertionError("a kernel of a batch is disassembled by itself")

    monkeypatch.setattr(cubin, "sass_of", sass_of)
    monkeypatch.setattr(cubin, "sass", sass)
    return sizes


def test_contracts_of_many_are_checked_in_groups_and_once(
    probe: Any, monkeypatch: pytest.MonkeyPatch, disassembled: list[int]
) -> None:
    monkeypatch.setattr(batch._Unheld, "together", 8)
    variants = [probe.variant(target, factor=factor) for target in ("sm_121a", "sm_90a") for factor in range(2, 13)]
    for _ in range(2):
        results = batch.build_all(variants, jobs=2)
        assert [result.variant for result in results] == variants
        assert all(result.record.outputs["contract"]["require"] for result in results)
    assert sum(disassembled) == len(variants) and len(disassembled) == 4


def test_each_of_a_group_is_held_to_its_own_code(
    probe: Any, monkeypatch: pytest.MonkeyPatch, disassembled: list[int]
) -> None:
    def contract(knobs: Any, arch: Any) -> Contract:
        own = rf"\b{knobs.factor}\b"
        return Contract(require=(own,), forbid=(own,) if knobs.factor in (40, 50) else ())

    monkeypatch.setattr(batch._Unheld, "together", 8)
    monkeypatch.setattr(probe.module, "SCALE", dataclasses.replace(probe.module.SCALE, contract=contract))
    results = batch.build_all([probe.variant(factor=factor) for factor in range(38, 54)], jobs=2)
    broken = [result for result in results if isinstance(result, Failed)]
    assert [result.variant.knobs.factor for result in broken] == [40, 50]
    assert all("ruled out" in str(result.error) and "no instruction" not in str(result.error) for result in broken)
    assert len(disassembled) == 2


def test_what_nvdisasm_refuses_in_a_group_fails_by_itself(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    really = cubin.sass

    def sass_of(images: list[bytes], target: str) -> list[list[str]]:
        raise ToolchainError("refused")

    def sass(image: bytes) -> list[str]:
        if image == odd:
            raise ToolchainError("nvdisasm refuses the image")
        return really(image)

    odd = build.obtain(probe.variant(factor=3)).image
    monkeypatch.setattr(cubin, "sass_of", sass_of)
    monkeypatch.setattr(cubin, "sass", sass)
    results = batch.build_all([probe.variant(factor=factor) for factor in (2, 3, 4)])
    assert [type(result) for result in results] == [Built, Failed, Built]
    assert "refuses the image" in str(results[1].error)


def test_nothing_to_build_is_no_error(probe: Any) -> None:
    assert batch.build_all([]) == []


def test_no_more_compiles_run_at_once_than_were_asked_for(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, guard = 0, 0, threading.Lock()
    really = nvrtc.compile

    def compile(*arguments: Any, **more: Any) -> Any:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        try:
            return really(*arguments, **more)
        finally:
            with guard:
                running -= 1

    monkeypatch.setattr(nvrtc, "compile", compile)
    probe.set(JITMX_JOBS="3")
    batch.build_all([probe.variant(factor=factor) for factor in range(20, 30)], strict=False)
    assert most <= 3
    most = 0
    batch.build_all([probe.variant(factor=factor) for factor in range(30, 36)], jobs=1, strict=False)
    assert most == 1


def test_an_interrupt_ends_a_warm_up_at_once(probe: Any, compiles: list[str]) -> None:
    def interrupt(result: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batch.build_all(
            [probe.variant(factor=factor) for factor in range(40, 60)], jobs=1, on_result=interrupt, strict=False
        )
    assert len(compiles) < 10


def test_an_interpreter_that_ends_while_kernels_are_queued_starts_no_more_of_them(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, submit = [], ThreadPoolExecutor.submit

    def refuse(pool: ThreadPoolExecutor, run: Any, place: int, *arguments: Any) -> Any:
        if place == 5:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(pool, run, place, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    monkeypatch.setattr(batch, "_attempt", lambda place, *arguments: begun.append(place) or time.sleep(1) or [])
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        batch.build_all([probe.variant(factor=factor) for factor in range(20, 35)], jobs=1)
    assert begun == [0]


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_threads_that_ask_at_once_share_one_compile(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(build, "_memory_only", stores.Store(None))
    probe.set(JITMX_MODE=mode)
    together, results = threading.Barrier(8), []

    def ask() -> None:
        together.wait()
        results.append(build.obtain(probe.variant(factor=11)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.status for result in results) == ["compiled"] + ["hit"] * 7
    assert len({result.image for result in results}) == len(compiles) == 1


def test_a_lock_that_cannot_be_had_in_time_means_a_private_compile(
    probe: Any, compiles: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    probe.set(JITMX_LOCK_TIMEOUT="0.3")
    with stores.Store(probe.cache).lock(key(probe), 1) as held:
        assert held
        ends: list[Built] = []
        thread = threading.Thread(target=lambda: ends.append(build.obtain(probe.variant())))
        thread.start()
        thread.join()
    assert ends[0].status == "compiled" and len(compiles) == 1
    assert len(warnings(caplog)) == 1 and "held by another process" in warnings(caplog)[0]
    assert build.obtain(probe.variant()).status == "hit"


def test_a_thread_that_holds_a_kernel_for_ever_does_not_hold_the_others(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.set(JITMX_LOCK_TIMEOUT="0.3")
    began, release, really = threading.Event(), threading.Event(), nvrtc.compile

    def hang(*arguments: Any, **more: Any) -> Any:
        began.set()
        release.wait(30)
        return really(*arguments, **more)

    monkeypatch.setattr(nvrtc, "compile", hang)
    thread = threading.Thread(target=build.obtain, args=(probe.variant(),))
    thread.start()
    began.wait(30)
    monkeypatch.setattr(nvrtc, "compile", really)
    assert build.obtain(probe.variant()).status == "compiled"
    release.set()
    thread.join()
    assert build.obtain(probe.variant()).status == "hit"


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_child_forked_while_a_thread_compiles_can_build(
    probe: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(build, "_memory_only", stores.Store(None))
    probe.set(JITMX_MODE=mode)
    build.obtain(probe.variant(factor=3))
    began, release = threading.Event(), threading.Event()
    really: Callable[..., Any] = nvrtc.compile

    def slow(*arguments: Any, **more: Any) -> Any:
        began.set()
        release.wait(60)
        return really(*arguments, **more)

    monkeypatch.setattr(nvrtc, "compile", slow)
    thread = threading.Thread(target=build.obtain, args=(probe.variant(),))
    thread.start()
    began.wait(30)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            nvrtc.compile = really
            if mode == "auto":
                # The parent rightly holds the kernel's lock; in mode off there is none to wait for.
                probe.set(JITMX_LOCK_TIMEOUT="0.3")
            status = 0 if build.obtain(probe.variant()).status == "compiled" else 2
        finally:
            os._exit(status)
    deadline = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(ended[1]) == 0


def test_a_site_cache_serves_and_is_never_written(probe: Any, compiles: list[str], tmp_path: Path) -> None:
    site = tmp_path / "site"
    probe.set(JITMX_CACHE_DIR=str(site))
    build.obtain(probe.variant(), strict=True)
    before = {path: path.stat().st_mtime_ns for path in site.rglob("*")}
    probe.set(JITMX_CACHE_DIR=str(probe.cache), JITMX_SITE_CACHE=str(site))
    for strict in (False, True):
        assert build.obtain(probe.variant(), strict=strict).status == "hit"
    build.obtain(probe.variant(factor=3))
    assert {path: path.stat().st_mtime_ns for path in site.rglob("*")} == before
    assert len(list(probe.cache.rglob("*.cubin"))) == 1
    assert len(compiles) == 2


def test_a_refused_cache_ends_a_warm_up_before_it_begins(probe: Any, compiles: list[str]) -> None:
    probe.cache.mkdir()
    probe.cache.chmod(0o777)
    probe.next_process()
    with pytest.raises(CacheError, match="written by others"):
        batch.build_all([probe.variant()])
    assert compiles == []


def test_no_patience_for_locks_still_builds(probe: Any) -> None:
    probe.set(JITMX_LOCK_TIMEOUT="0")
    assert build.obtain(probe.variant()).status == "compiled"


@pytest.mark.parametrize("strict", [False, True])
def test_where_nothing_can_be_written_a_kernel_is_compiled_and_checked_once(
    probe: Any, compiles: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    really, calls = cubin.sass, []

    def sass(image: bytes) -> list[str]:
        calls.append(image)
        return really(image)

    monkeypatch.setattr(cubin, "sass", sass)
    probe.cache.parent.joinpath("file").write_text("")
    probe.set(JITMX_CACHE_DIR=str(probe.cache.parent / "file" / "cache"))
    statuses = [build.obtain(probe.variant(), strict=strict).status for _ in range(3)]
    build.obtain(probe.variant(), strict=True)
    build.obtain(probe.variant(), strict=True)
    assert statuses == ["compiled", "hit", "hit"]
    assert len(compiles) == len(calls) == len(warnings(caplog)) == 1
