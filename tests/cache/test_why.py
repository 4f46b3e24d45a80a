"""Each kind of change has its words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jitmx.cache.manifest import Record
from jitmx.cache.why import Subject, changes, explain, predecessor

Make = Callable[..., tuple[Record, bytes, str]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def record(make: Make) -> Record:
    return make("a", source="one\ntwo\nthree\n")[0]


def altered(record: Record, knobs: dict[str, Any] | None = None, **inputs: Any) -> Subject:
    return Subject(record.knobs if knobs is None else knobs, {**record.inputs, **inputs})  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"headers": {"jitmx/a.cuh": digest("a"), "cuda_fp8.h": digest("new")}}, ["header cuda_fp8.h changed"]),
        ({"headers": {"jitmx/a.cuh": digest("a")}}, ["header cuda_fp8.h no longer included"]),
        (
            {"headers": {"jitmx/a.cuh": digest("a"), "cuda_fp8.h": digest("fp8"), "x.h": digest("x")}},
            ["header x.h added"],
        ),
        ({"knobs": {"factor": 2, "stages": 4, "half": False}}, ["knob stages 3 → 4"]),
        ({"knobs": {"factor": 2, "stages": 3, "half": True}}, ["knob half false → true"]),
        ({"knobs": {"factor": 2, "stages": 3}}, ["knob half removed (was false)"]),
        ({"knobs": {"factor": 2, "stages": 3, "half": False, "pdl": True}}, ["knob pdl added (true)"]),
        ({"nvrtc": "13.6", "nvrtc_digest": digest("13.6")}, ["NVRTC 13.5 → 13.6"]),
        ({"nvrtc_digest": digest("rebuilt")}, ["NVRTC 13.5 is another build of that release"]),
        ({"arch": "sm_120a", "options": ["-arch=sm_120a", "-std=c++17"]}, ["target sm_121a → sm_120a"]),
        ({"options": ["-arch=sm_121a", "-std=c++20"]}, ["option -std c++17 → c++20"]),
        ({"options": ["-arch=sm_121a", "-std=c++17", "--maxrregcount=64"]}, ["option --maxrregcount=64 added"]),
        ({"options": ["-arch=sm_121a"]}, ["option -std=c++17 removed"]),
        ({"options": ["-std=c++17", "-arch=sm_121a"]}, ["options in another order: -std=c++17 -arch=sm_121a"]),
        ({"source_digest": digest("other")}, ["template source changed"]),
        ({"schema": 2}, ["key schema 1 → 2"]),
        ({}, []),
    ],
)
def test_a_change_is_named_in_words(record: Record, change: dict[str, Any], words: list[str]) -> None:
    assert changes(Subject.of(record), altered(record, **change)) == words


def test_several_changes_are_all_named_knobs_first(record: Record) -> None:
    later = altered(
        record,
        knobs={"factor": 2, "stages": 4, "half": False},
        source_digest=digest("rendered with other knobs"),
        headers={"jitmx/a.cuh": digest("a"), "cuda_fp8.h": digest("new")},
        nvrtc="13.6",
        nvrtc_digest=digest("13.6"),
    )
    words = ["knob stages 3 → 4", "header cuda_fp8.h changed", "NVRTC 13.5 → 13.6"]
    assert changes(Subject.of(record), later) == words


def test_kept_sources_tell_how_much_of_the_template_changed(record: Record) -> None:
    after = "one\nTWO\nthree\nfour\n"
    kept = {record.inputs["source_digest"]: "one\ntwo\nthree\n", digest(after): after}
    later = altered(record, source_digest=digest(after))
    assert changes(Subject.of(record), later, kept.get) == [
        "template source changed (2 lines added, 1 removed, the first at line 2)"
    ]
    later = altered(record, source_digest=digest("one\r\ntwo\r\nthree\r\n"))
    kept[digest("one\r\ntwo\r\nthree\r\n")] = "one\r\ntwo\r\nthree\r\n"
    assert changes(Subject.of(record), later, kept.get) == ["template source changed in its line ends"]
    del kept[record.inputs["source_digest"]]
    assert changes(Subject.of(record), later, kept.get) == ["template source changed"]


def test_the_predecessor_is_of_the_same_kernel_earlier_of_the_same_target_with_the_nearest_knobs(make: Make) -> None:
    base, _, _ = make("base", created=100.0)

    def kin(key: str, **members: Any) -> Record:
        return replace(base, key=key * 64, **({"created": 50.0} | members))

    knobs = base.knobs
    ranked = [
        kin("1", created=90.0),
        kin("2", created=10.0),
        kin("3", knobs={**knobs, "stages": 4}),
        kin("4", knobs={**knobs, "stages": 4, "factor": 3}, created=99.0),
        kin("5", arch="sm_120a"),
        kin("6", created=200.0),
    ]
    strangers = [kin("7", kernel="other"), kin("8", family="other"), base]
    for skipped, expected in enumerate(ranked):
        assert predecessor(base, [*strangers, *reversed(ranked[skipped:])]) == expected
    assert predecessor(base, strangers) is None


def test_an_entry_is_explained_by_its_predecessor(make: Make) -> None:
    old, _, _ = make("a", created=1_000_000_000.0, inputs={"nvrtc": "13.0"})
    new = replace(make("a")[0], key="e" * 64, created=1_000_000_100.0, inputs=make("a")[0].inputs)
    said = explain(new, [old, new])
    assert len(said) == 2
    assert said[0].startswith("probe.scale.a for sm_121a (key eeeeeeeeeeee) was compiled on 2001-09-")
    assert said[0].endswith("with NVRTC 13.5.")
    assert said[1].startswith(f"Its nearest predecessor is probe.scale.a for sm_121a (key {old.key[:12]}, compiled on ")
    assert said[1].endswith("what changed: NVRTC 13.0 → 13.5.")


def test_an_only_entry_and_one_with_later_kin_are_explained(record: Record) -> None:
    assert explain(record, [record])[1] == ("It is the only entry of probe.scale: there is nothing to compare it with.")
    later = replace(record, key="e" * 64, created=record.created + 5, inputs={**record.inputs, "nvrtc": "13.6"})
    assert explain(record, [record, later])[1].startswith("Its nearest other entry is ")
    assert explain(record, [record, later])[1].endswith("what changed: NVRTC 13.6 → 13.5.")


def test_the_last_sentence_says_whether_the_entry_is_current(record: Record) -> None:
    assert explain(record, [record], present=Subject.of(record))[-1] == "It is current: a look-up now finds it."
    stale = altered(record, headers={"jitmx/a.cuh": digest("new"), "cuda_fp8.h": digest("fp8")})
    assert explain(record, [record], present=stale)[-1] == (
        "It is stale, and its next use compiles it again: header jitmx/a.cuh changed."
    )
