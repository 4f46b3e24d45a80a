"""Compiling in the background: in the order asked for, faults told and not warned about, and no more than is wanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jitmx import arch
from jitmx.bench.tuning_builds import Background
from jitmx.build import Built
from jitmx.dispatch.journal import Fault
from jitmx.dispatch.tune import Candidate
from jitmx.errors import CacheError, CompileError
from jitmx.kernels.linear import stream
from jitmx.registry.spec import Variant

SM_90 = arch.parse("sm_90")


def candidate(*stages: int) -> Candidate:
    variants = tuple(stream.SPEC.variant(SM_90, share=False, stages=each) for each in stages)
    return Candidate("stream", {"stages": stages[0]}, variants)


class Compiler:
    """Makes nothing; holds a variant of so many stages until it is let go, and keeps what it was asked for."""

    def __init__(self, breaches: dict[int, str] | None = None, errors: dict[int, Exception] | None = None) -> None:
        self.breaches, self.errors = breaches or {}, errors or {}
        self.asked: list[int] = []
        self.held: dict[int, threading.Event] = {}

    def __call__(self, variant: Variant) -> Built:
        stages = variant.knobs.stages
        self.asked.append(stages)
        if stages in self.held:
            assert self.held[stages].wait(30)
        if stages in self.errors:
            raise self.errors[stages]
        if stages in self.breaches:
            logging.getLogger("jitmx.build").warning("it breaks its contract")
        return cast(Built, SimpleNamespace(breaches=tuple(filter(None, [self.breaches.get(stages)]))))


def hold(compiler: Compiler, *stages: int) -> Callable[[int], None]:
    compiler.held = {each: threading.Event() for each in stages}
    return lambda each: compiler.held[each].set()


def test_the_first_that_is_there_is_named_however_long_the_others_take() -> None:
    compiler = Compiler()
    let_go = hold(compiler, 1)
    with Background(2, compile=compiler) as builds:
        waiting = [candidate(1), candidate(2), candidate(3)]
        builds.ask(waiting)
        assert builds.first(waiting, None) == (1, None)
        assert builds.first(waiting[:1], 0.0) is None and builds.first(waiting[:1], 0.05) is None
        let_go(1)
        assert builds.first(waiting[:1], None) == (0, None)
    assert compiler.asked[0] == 1


def test_a_candidate_is_there_once_both_ends_of_its_range_are() -> None:
    compiler = Compiler()
    let_go = hold(compiler, 2)
    with Background(2, compile=compiler) as builds:
        builds.ask([candidate(1, 2), candidate(2)])
        assert builds.first([candidate(1, 2)], 0.05) is None
        let_go(2)
        assert builds.first([candidate(1, 2)], None) == (0, None)
    assert sorted(compiler.asked) == [1, 2]


def test_a_breach_is_told_and_not_warned_about_and_so_is_what_does_not_compile(caplog: Any) -> None:
    compiler = Compiler(breaches={1: "64 B spilled"}, errors={2: CompileError("no such thing")})
    with caplog.at_level(logging.WARNING, "jitmx.build"), Background(1, compile=compiler) as builds:
        assert builds.first([candidate(1)], None) == (0, Fault("it breaks its contract: 64 B spilled", breach=True))
        assert builds.first([candidate(2)], None) == (0, Fault("no such thing"))
        assert not caplog.records
        logging.getLogger("jitmx.build").warning("of something else")
        assert len(caplog.records) == 1


def test_a_cache_that_must_not_be_used_ends_the_run() -> None:
    with (
        Background(1, compile=Compiler(errors={1: CacheError("others can write to it")})) as builds,
        pytest.raises(CacheError, match="others can write to it"),
    ):
        builds.first([candidate(1)], None)


def test_what_is_dropped_is_not_begun_unless_another_row_asked_for_it_too() -> None:
    compiler = Compiler()
    let_go = hold(compiler, 1)
    with Background(1, compile=compiler) as builds:
        builds.ask([candidate(1), candidate(2), candidate(3)])
        builds.ask([candidate(3), candidate(4)])
        builds.drop([candidate(1), candidate(2), candidate(3)])
        let_go(1)
        assert builds.first([candidate(4)], None) == (0, None)
        assert compiler.asked == [1, 3, 4]
        builds.ask([candidate(2)])  # a later row wants it after all
        assert builds.first([candidate(2)], None) == (0, None)
    assert compiler.asked == [1, 3, 4, 2]


def test_what_has_not_begun_at_the_end_never_does() -> None:
    compiler = Compiler()
    let_go = hold(compiler, 1)
    with Background(1, compile=compiler) as builds:
        builds.ask([candidate(1), candidate(2)])
        timer = threading.Timer(0.2, let_go, [1])
        timer.start()
    assert compiler.asked == [1]
