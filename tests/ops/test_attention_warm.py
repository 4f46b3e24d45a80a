"""A warm call of `jitmx.attention` does what a cold one does, whatever has become of its tensors in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitmx
from jitmx import settings
from jitmx.dispatch.call import explain
from jitmx.errors import CaptureError, InputError, JitmxError
from jitmx.ops.attention import calls, plan
from jitmx.runtime import alike, card
from simulated_card import Simulated, on_cpu

BF16 = torch.bfloat16


class Noting(Simulated):
    """Notes each launch: the kernel and its arguments."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.bound, self.packed, self.loads = 0, 0, True
        self.calls: list[dict[str, Any]] = []

    def bind(
        self, variant: Any, _device: int, _launch: Any, takes: Any, fixed: Any, *, dependent: bool = True
    ) -> Callable[..., None]:
        kernel = {"kernel": variant.name, "dependent": dependent}
        if takes:
            if not self.loads:
                raise CaptureError(f"{variant.name} is not loaded yet")
            self.bound += 1
        else:  # what is packed is loaded
            self.packed += 1

        def run(*values: Any) -> None:
            given = dict(zip(takes, values, strict=True))
            self.calls.append({**kernel, **fixed, **given})

        return run


@pytest.fixture(autouse=True, params=["C", "Python"])
def noting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Noting]:
    """An sm_90a card that launches nothing; tensors are compared by torch's function of C, or in Python."""
    if request.param == "Python":
        monkeypatch.setattr(alike, "_guards", lambda: None)
    else:
        assert alike._guards() is not None
    with on_cpu("sm_90a", Noting) as found:
        assert isinstance(found, Noting)
        yield found


def inputs(batch: int = 2, *, e4m3: bool = False, everything: bool = False) -> dict[str, Any]:
    """Arguments of a decode; with `everything` all that a call may have beside q."""
    tokens, kind = 2 * batch, torch.uint8 if e4m3 or everything else BF16
    made: dict[str, Any] = {
        "q": torch.zeros(tokens, 8, 64, dtype=BF16), "k_new": torch.zeros(tokens, 2, 64, dtype=BF16),
        "v_new": torch.zeros(tokens, 2, 64, dtype=BF16), "k_cache": torch.zeros(6, 16, 2, 64, dtype=kind),
        "v_cache": torch.zeros(6, 16, 2, 64, dtype=kind), "block_table": torch.zeros(batch, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(batch, dtype=torch.int32), "query_start_loc": torch.zeros(batch + 1, dtype=torch.int32),
        "sinks": torch.zeros(8, dtype=BF16), "rope": torch.zeros(80, 64, dtype=BF16),
        "out": torch.zeros(tokens, 8, 64, dtype=BF16),
        "slot_mapping": torch.zeros(tokens, dtype=torch.int64), "max_query_len": 2, "max_seq_len": 50,
    }  # fmt: skip
    if e4m3 or everything:
        made |= {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    if everything:
        made |= {"mask": torch.zeros(tokens, 1, dtype=torch.int32), "positions": torch.zeros(tokens, dtype=torch.int64)}
    return made


def outcome(noting: Noting, given: dict[str, Any]) -> Any:
    """What a call launches, or why it is refused."""
    noting.calls.clear()
    try:
        jitmx.attention(**given)
    except JitmxError as error:
        return f"{type(error).__name__}: {error}"
    return list(noting.calls)


def cold(noting: Noting, given: dict[str, Any]) -> Any:
    """The same with no plan known."""
    for plans in (calls._plans, calls.recent):
        plans.clear()
    return outcome(noting, given)


def packed(noting: Noting, given: dict[str, Any]) -> Any:
    """What a call launches once its addresses are packed."""
    before = noting.packed
    for _ in range(plan._PACKED_AFTER + 2):
        jitmx.attention(**given)
    assert noting.packed == before + 1
    return outcome(noting, given)


TENSORS = [name for name, value in inputs(everything=True).items() if isinstance(value, torch.Tensor)]


def moved(tensor: torch.Tensor) -> None:
    tensor.set_(torch.zeros_like(tensor))  # type: ignore[call-overload]


def shorter(tensor: torch.Tensor) -> None:
    tensor.resize_([size - 1 for size in tensor.shape])


def other_type(tensor: torch.Tensor) -> None:
    tensor.data = tensor.double()


CHANGES = {"moved": moved, "shorter": shorter, "other type": other_type}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_was_changed_in_place_is_taken_as_it_is_now(name: str, change: str, noting: Noting) -> None:
    given = inputs(everything=True)
    before = outcome(noting, given)
    assert isinstance(before, list) and outcome(noting, given) == before
    CHANGES[change](given[name])
    warm = outcome(noting, given)
    assert warm == cold(noting, given)
    assert warm != before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_was_changed_in_place_after_its_address_was_packed_is_taken_as_it_is_now(
    name: str, change: str, noting: Noting
) -> None:
    given = inputs(everything=True)
    before = packed(noting, given)
    assert before == cold(noting, given)
    packed(noting, given)
    CHANGES[change](given[name])
    warm = outcome(noting, given)
    assert warm == cold(noting, given)
    assert warm != before


@pytest.mark.parametrize("name", [name for name in TENSORS if name not in ("positions", "mask", "k_scale", "v_scale")])
def test_a_call_without_the_tensors_that_most_lack_has_all_others_where_they_are_now(name: str, noting: Noting) -> None:
    given = inputs()
    before = packed(noting, given)
    moved(given[name])
    warm = outcome(noting, given)
    assert warm == cold(noting, given)
    assert warm != before


def test_addresses_are_packed_once_for_each_cache_that_keeps_them(noting: Noting) -> None:
    """Layers take turns with one plan, and one of them has its output elsewhere each time."""
    layers = [inputs() for _ in range(3)]
    outs = [torch.zeros_like(layers[0]["out"]) for _ in range(2)]
    for step in range(3 * plan._PACKED_AFTER):
        for number, given in enumerate(layers):
            given |= {"out": outs[step % 2]} if number == 2 else {}
            (launch,) = outcome(noting, given)
            assert [launch[name] for name in ("k_cache", "out")] == [
                given[name].data_ptr() for name in ("k_cache", "out")
            ]
    assert (noting.bound, noting.packed) == (1, 2)


def test_caches_whose_addresses_are_known_are_bounded(noting: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MOST_CACHES", 2)
    given = inputs()
    caches = [torch.zeros_like(given["k_cache"]) for _ in range(5)]
    for _ in range(2):
        for cache in caches:
            (launch,) = outcome(noting, {**given, "k_cache": cache})
            assert launch["k_cache"] == cache.data_ptr()
            (known,) = calls._plans.values()
            assert len(known.last) <= 2


def test_of_several_launches_none_is_packed(noting: Noting) -> None:
    given = mixed()
    before = outcome(noting, given)
    for _ in range(plan._PACKED_AFTER + 2):
        assert outcome(noting, given) == before
    assert len(before) == 3 and noting.packed == 0


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_whose_strides_were_changed_in_place_is_taken_as_it_is_now(name: str, noting: Noting) -> None:
    given = inputs(everything=True)
    tensor = given[name]
    shape, strides = tensor.shape, tensor.stride()
    tensor.set_(torch.zeros(2 * tensor.numel(), dtype=tensor.dtype))
    tensor.as_strided_(shape, strides)
    before = outcome(noting, given)
    tensor.as_strided_(shape, (2 * strides[0], *strides[1:]))
    warm = outcome(noting, given)
    assert warm == cold(noting, given)
    assert (warm == before) == (shape[0] == 1)  # scales of one element lie as well with any stride


@pytest.mark.parametrize("name", TENSORS)
def test_a_new_tensor_at_the_place_of_a_freed_one_is_taken_as_it_is(name: str, noting: Noting) -> None:
    """The same id, and often the same memory."""
    given = inputs(everything=True)
    given[name] = given[name].clone()
    before = outcome(noting, given)
    shape, dtype, at = given[name].shape, given[name].dtype, id(given[name])
    del given[name]
    for _ in range(1000):
        given[name] = torch.zeros([size + 1 for size in shape], dtype=dtype)
        if id(given[name]) == at:
            break
        del given[name]
    else:
        pytest.skip("the id was not given again")
    warm = outcome(noting, given)
    assert warm == cold(noting, given)
    assert warm != before


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_on_another_device_is_refused_by_a_warm_call_too(name: str, noting: Noting) -> None:
    given = inputs(everything=True)
    outcome(noting, given)
    given[name] = given[name].to("meta")
    said = outcome(noting, given)
    assert isinstance(said, str) and said == cold(noting, given)


@pytest.mark.parametrize("name", ["slot_mapping", "positions", "sinks", "rope", "mask", "out"])
def test_a_tensor_that_is_left_out_or_added_is_noticed(name: str, noting: Noting) -> None:
    given = inputs(everything=True)
    without = {key: value for key, value in given.items() if key != name}
    for first, second in ((given, without), (without, given)):
        jitmx.attention(**first)
        (launch,) = outcome(noting, second)
        field = {"slot_mapping": "slots"}.get(name, name)
        assert (launch[field] != 0) == (second is given or name == "out")


@pytest.mark.parametrize(
    ("name", "value"),
    [("window", 3), ("scale", 0.5), ("soft_cap", 2.0), ("rope_style", "interleaved"), ("max_query_len", 1),
     ("max_seq_len", None), ("max_seq_len", 65), ("max_seq_len", 0), ("max_seq_len", -1), ("max_seq_len", 50.0),
     ("max_seq_len", "50"), ("window", [3]), ("fp16_qk", True), ("knobs", {"kernel": "decode", "warps": 1})],
)  # fmt: skip
def test_a_number_that_differs_is_noticed(name: str, value: Any, noting: Noting) -> None:
    given = inputs(e4m3=True)
    before = outcome(noting, given)
    other = {**given, name: value}
    warm = outcome(noting, other)
    assert warm == cold(noting, other)
    assert warm != before or name.startswith("max_")
    assert outcome(noting, given) == before


def test_a_context_longer_than_the_table_of_angles_is_refused_by_a_warm_call_too(noting: Noting) -> None:
    given = inputs()
    given["rope"] = given["rope"][:60]
    assert isinstance(outcome(noting, given), list)
    said = outcome(noting, {**given, "max_seq_len": 61})
    assert said == "InputError: rope has 60 positions, and max_seq_len=61; pass a longer table"


def test_a_gradient_that_is_asked_for_later_is_refused_where_torch_notes_it(noting: Noting) -> None:
    given = inputs()
    before = packed(noting, given)
    given["sinks"].requires_grad_()
    with pytest.raises(InputError, match="sinks requires a gradient"):
        jitmx.attention(**given)
    for quiet in (torch.no_grad(), torch.inference_mode()):
        with quiet:
            assert outcome(noting, given) == before
    with pytest.raises(InputError, match="sinks requires a gradient"):
        jitmx.attention(**given)


def test_inference_mode_and_its_tensors_have_the_plan_of_others(noting: Noting) -> None:
    given = inputs()
    before = outcome(noting, given)
    made = noting.bound
    for quiet in (torch.inference_mode(), torch.no_grad(), contextlib.nullcontext(), torch.autocast("cpu")):
        with quiet:
            assert outcome(noting, given) == before
            again = {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in given.items()}
            assert [launch["kernel"] for launch in outcome(noting, again)] == [before[0]["kernel"]]
    assert noting.bound == made


def test_one_tensor_for_both_scales_is_served_from_the_plan(noting: Noting) -> None:
    given = inputs(e4m3=True)
    scale = given["k_scale"]
    both = {**given, "v_scale": scale}
    for call in (given, both, given, both):
        (launch,) = outcome(noting, call)
        assert (launch["k_scale"], launch["v_scale"]) == (scale.data_ptr(), call["v_scale"].data_ptr())
    assert noting.bound == 1


def test_a_warm_call_keeps_no_tensor(noting: Noting) -> None:
    given = inputs(everything=True)
    jitmx.attention(**given)
    counts = {name: torch._C._storage_Use_Count(given[name].untyped_storage()._cdata) for name in TENSORS}
    fresh = inputs(everything=True)
    assert counts == {name: torch._C._storage_Use_Count(fresh[name].untyped_storage()._cdata) for name in TENSORS}


def test_a_warm_call_loads_nothing_while_a_graph_is_captured_and_another_shape_is_refused(noting: Noting) -> None:
    given, other = inputs(), inputs(3)
    before = outcome(noting, given)
    noting.loads = False
    assert outcome(noting, given) == before
    for _ in range(2):
        assert outcome(noting, other).startswith("CaptureError: attention.decode")
    assert outcome(noting, given) == before
    noting.loads = True
    assert isinstance(outcome(noting, other), list)


def test_settings_that_change_and_another_card_are_heard_by_warm_calls(
    noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs()
    (before,) = outcome(noting, given)
    monkeypatch.setenv("JITMX_ATTENTION_KNOBS", "kernel=decode,warps=2,keys=16")
    settings.reload()
    try:
        (after,) = outcome(noting, given)
        assert after["kernel"] != before["kernel"] and "warps2" in after["kernel"]
    finally:
        monkeypatch.delenv("JITMX_ATTENTION_KNOBS")
        settings.reload()
    assert outcome(noting, given) == [before]
    with on_cpu("sm_90a", Noting) as another:
        assert isinstance(another, Noting)
        jitmx.attention(**given)
        assert another.calls == [before]
    assert card.current() is noting


def mixed() -> dict[str, Any]:
    """Three requests of 40 new tokens at most, some of them of one."""
    given = inputs(3)
    rows = {"q": 8, "k_new": 2, "v_new": 2, "out": 8}
    given |= {name: torch.zeros(42, heads, 64, dtype=BF16) for name, heads in rows.items()}
    return {**given, "slot_mapping": torch.zeros(42, dtype=torch.int64), "max_query_len": 40}


@pytest.mark.parametrize("knobs", ["", "kernel=prefill,rows=64,tiles=1", "kernel=wgmma,pdl=0"])
def test_a_mixed_batch_launches_what_explain_says_whatever_knobs_are_set(
    knobs: str, noting: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Knobs are for the kernel of long requests: those of short ones have none of them."""
    monkeypatch.setenv("JITMX_ATTENTION_KNOBS", knobs)
    settings.reload()
    try:
        launched = [launch["kernel"] for launch in outcome(noting, mixed())]
        fields = {"batch": 3, "context": 64, "queries": 40, "kv_heads": 2, "group": 4, "sinks": "sinks_bf16"}
        said = explain("attention", noting.target, multiprocessors=4, **fields, rope="neox", rotary=64)
        first, write, short = (launch.choice.variant.name for launch in said.launches)
        assert launched == [write, first, short]
        assert [name.split(".")[1] for name in launched] == [
            "append",
            "prefill" if "prefill" in knobs else "wgmma",
            "decode",
        ]
    finally:
        monkeypatch.delenv("JITMX_ATTENTION_KNOBS")
        settings.reload()


def test_a_target_s_plan_is_found_again_behind_a_call_of_another_shape(noting: Noting) -> None:
    """Layers with a window, without one, and steps of other batches take turns."""
    calls_of = [{**inputs(batch), "window": window} for batch in (1, 2, 3) for window in (None, 4)]
    first = [outcome(noting, given) for given in calls_of]
    made = noting.bound
    assert [outcome(noting, given) for given in calls_of] == first
    assert noting.bound == made == len(calls_of)


def test_what_is_no_tensor_is_refused_by_a_warm_call_too(noting: Noting) -> None:
    given = inputs(everything=True)
    outcome(noting, given)
    for name in TENSORS:
        if name != "q":
            said = outcome(noting, {**given, name: [1]})
            assert said.startswith(f"InputError: {name} is a list"), said


@pytest.mark.parametrize("kind", [None, lambda *_, **__: SimpleNamespace(check=lambda *_: True), "missing"])
def test_where_torch_s_function_is_absent_or_says_otherwise_tensors_are_compared_in_python(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    module = SimpleNamespace() if kind == "missing" else SimpleNamespace(TensorGuards=kind)
    monkeypatch.setattr(alike.importlib, "import_module", lambda _name: module)
    assert alike._guards.__wrapped__() is None


def test_attention_begins_behind_all_before_it_unless_the_caller_says_that_what_it_reads_early_is_there(
    noting: Noting,
) -> None:
    """What a launch reads before its wait may be the work of a launch that is still there, such as a tree's mask."""
    given = inputs(everything=True)
    long = inputs() | {"max_query_len": 40, "max_seq_len": 64}
    for early in (False, True):
        for number in range(plan._PACKED_AFTER + 4):  # cold, warm and packed
            assert [one["dependent"] for one in outcome(noting, given | {"early": early})] == [early], number
        behind = [one["dependent"] for one in outcome(noting, long | {"early": early})]
        assert len(behind) == 3 and behind == [early, True, True]
    assert [one["dependent"] for one in outcome(noting, given)] == [False]
    noting.calls.clear()
    kept = {name: given[name] for name in given if name not in ("q", "sinks", "out", "mask", "max_seq_len")}
    jitmx.append_kv(**kept)
    assert [one["dependent"] for one in noting.calls] == [False]
