"""A step of speculation: its launches are those that vLLM makes, and what it gains follows from what its parts take."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from jitmx import arch
from jitmx.cli import main
from jitmx.costs import cards
from jitmx.kernels.linear.layout import packed_tiles
from jitmx.models import GPT_OSS_120B, NAMED_DRAFTS
from jitmx.serving import draft_step, model_step
from jitmx.serving.draft_step import FEWER_EXPERTS, HOST_US

LARGE, SMALL = (NAMED_DRAFTS[name] for name in ("gpt-oss-120b-eagle3", "gpt-oss-20b-eagle3-32k"))
RATES = [(0.74, 0.54), (0.6,)]
ORDER = ["fc", "qkv", "attention", "o", "gate_up", "down", "lm_head"]


@pytest.mark.parametrize("target", cards.CARDS)
@pytest.mark.parametrize("draft", [LARGE, SMALL])
def test_a_draft_reads_every_weight_once_a_step(target: str, draft) -> None:
    parts = list(draft_step.parts(draft, arch.parse(target), 1, 2048))
    # Where norms are in the products, those of what QKV reads are a launch of jitmx's too.
    wanted = ["fc", *(["inputs"] if target == "sm_90a" else []), *ORDER[1:]]
    assert [part.label for part in parts] == wanted and {part.layers for part in parts} == {1}
    without = draft_step.parts(draft, arch.parse(target), 1, 2048, first=False)
    assert [part.label for part in without] == wanted[1:]
    priced = model_step.priced(parts, cards.CARDS[target], 1)
    read = {one.label: one.work.bytes for one in priced if one.work}
    for kind, (n, k) in draft.dense.items():
        rows, tiles = packed_tiles(n, k)
        assert read[kind] == pytest.approx(rows * tiles * 544, rel=0.02), kind
    gates = next(part for part in parts if part.label == "gate_up").launch.choice.variant
    head = parts[-1].launch.choice.variant
    assert gates.knobs.as_dict()["swiglu"] and head.knobs.as_dict()["argmax"]


def test_what_a_step_gains_follows_from_its_parts() -> None:
    found = draft_step.price(GPT_OSS_120B, LARGE, arch.parse("sm_90a"), 1, 256, RATES)
    assert sorted(found.verify) == [1, 2, 3] and [(one.k, one.rates) for one in found.gains] == [
        (1, (0.74,)), (2, (0.74, 0.54)), (1, (0.6,))
    ]  # fmt: skip
    alone = {rows: step.us for rows, step in found.verify.items()}
    assert alone[1] < alone[2] < alone[3]
    for one in found.gains:
        drafting = one.us - alone[one.k + 1] - HOST_US
        assert one.k * 0.9 * found.draft.us < drafting < one.k * 1.1 * found.draft.us
        assert one.gain == pytest.approx(one.tokens * alone[1] / one.us)
        assert one.gain < one.gain_shared < one.gain / (1 - FEWER_EXPERTS)
    first, _, lower = found.gains
    assert lower.gain == pytest.approx(first.gain * 1.6 / 1.74)


def test_rows_that_are_verified_see_one_cache_and_hit_more_experts() -> None:
    one, three = (model_step.price(GPT_OSS_120B, arch.parse("sm_90a"), 1, 2048, rows=rows) for rows in (1, 3))
    many = model_step.price(GPT_OSS_120B, arch.parse("sm_90a"), 3, 2048)

    def us(step, label: str) -> float:
        return sum(priced.us for priced in step.launches if priced.label == label)

    assert us(three, "experts") == pytest.approx(us(many, "experts")) and us(three, "experts") > 2 * us(one, "experts")
    assert us(one, "attention") < us(three, "attention") < us(many, "attention") * 1.5
    assert any(priced.choice.variant.name == "tree.accept" for priced in three.launches)


def test_the_verb_says_it_as_text_and_as_json() -> None:
    words = [
        "explain",
        "--model",
        "gpt-oss-120b",
        "--draft",
        "gpt-oss-20b-eagle3-32k",
        "--rates",
        ".74,.54",
        "--arch",
        "sm_90",
    ]
    text = CliRunner().invoke(main, words)
    assert text.exit_code == 0 and "a step of the draft" in text.stdout and "GAIN, SHARED" in text.stdout
    found = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert [one["k"] for one in found["gains"]] == [1, 2] and set(found["verify_us"]) == {"1", "2", "3"}
    assert found["draft"]["us"] > 0 and found["host_us"] == HOST_US and found["schema_version"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("linear --draft gpt-oss-120b-eagle3", "--draft is of a step: name the model by --model"),
        ("--model gpt-oss-120b --rates .7", "--rates is of a draft: name it by --draft"),
        ("--model gpt-oss-120b --draft gpt-oss-120b-eagle3 --rates .5,.6", "each at most the one before it"),
        ("--model gpt-oss-120b --draft gpt-oss-120b-eagle3 --rates many", "is no list of up to 16 rates"),
        ("--model gpt-oss-120b --draft nothing", "is none of gpt-oss-120b-eagle3"),
    ],
)
def test_a_step_that_cannot_be_is_refused(words: str, said: str) -> None:
    done = CliRunner().invoke(main, ["explain", "--arch", "sm_90", *words.split()])
    assert done.exit_code != 0 and said in done.output + str(done.exception)
