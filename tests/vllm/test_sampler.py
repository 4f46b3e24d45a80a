"""Which batches jitmx's sampler takes, what it makes of them, and who has it: beside vLLM's own sampler and states."""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import simulated_card

vllm_world = pytest.importorskip("vllm_world")

from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states import default, resolve_model_state_cls
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from jitmx import arch, settings
from jitmx.serving.draft import Acceptance
from jitmx.serving.sampler import Sampler as Needed
from jitmx.vllm import hooks, sampler
from jitmx.vllm.request import requested
from jitmx.vllm.sampler import JitmxSampler

HOST = torch.device("cpu")
SLOTS, VOCAB = 12, 100
GREEDY = SamplingParams(temperature=0.0)


class Pinned:
    """vLLM's memory that host and GPU share, on a host without one."""

    def __init__(self, size: Any, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, n: int | None = None) -> torch.Tensor:
        return self.cpu[:n]


class Biased:
    """A processor of logits that a request asks for by its seed."""

    def add_request(self, _index: int, params: SamplingParams) -> bool:
        return params.seed == 7


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a sampler of vLLM, with room for twelve requests, which says "stock" of every batch."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", Pinned)
    monkeypatch.setattr(Sampler, "__call__", lambda self, logits, input_batch: "stock")

    def make(**options: Any) -> Any:
        config = VllmConfig()
        with set_current_vllm_config(config):
            requests = RequestState(SLOTS, 64, 32, 0, VOCAB, HOST)
            return Sampler(config, SLOTS, VOCAB, HOST, requests, **options)

    return make


def batch_of(slots: list[int], lengths: list[int] | None = None) -> InputBatch:
    """Requests in these slots, with one row of logits each; lengths are padded, as for a graph."""
    made = InputBatch.make_dummy(len(slots), len(slots), InputBuffers(SLOTS, 64, HOST))
    return dataclasses.replace(
        made, idx_mapping=torch.tensor(slots), idx_mapping_np=np.array(slots, np.intp),
        seq_lens=torch.tensor([*(lengths or [9] * len(slots)), 0, 0], dtype=torch.int32),
    )  # fmt: skip


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-30, 30, (rows, VOCAB), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def taken(ours: JitmxSampler, slots: list[int], **changes: Any) -> bool:
    """Whether a batch of these requests is jitmx's."""
    batch = dataclasses.replace(batch_of(slots), **changes)
    with simulated_card.on_cpu("sm_90a") as card:
        found: Any = ours(logits_of(len(slots)), batch)
    assert card.kernels == ([] if found == "stock" else ["sampling.greedy"])
    return bool(found != "stock")


def test_all_that_is_relied_on_is_as_it_was() -> None:
    assert hooks.moved(hooks.SAMPLER_HOOKS) == [] and len(hooks.SAMPLER_HOOKS) > 8
    assert sampler.changed() == ()


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_greedy_batch_gets_what_vllm_gives_it(stock: Callable[..., Any], rows: int) -> None:
    ours = JitmxSampler(stock(), torch.bfloat16)
    for seed in range(4):
        draw = np.random.default_rng(seed)
        slots = draw.permutation(SLOTS)[:rows].tolist()
        for slot in slots:
            ours.add_request(slot, GREEDY)
        prompts = ours.req_states.prefill_len
        prompts.np[:] = draw.integers(1, 30, SLOTS)
        prompts.copy_to_uva()
        batch = batch_of(slots, (prompts.np[slots] + draw.integers(-1, 2, rows)).tolist())
        logits = logits_of(rows, seed)
        with simulated_card.on_cpu("sm_90a") as card:
            found = ours(logits, batch)
        assert card.kernels == ["sampling.greedy"] and type(found) is SamplerOutput
        # As _gumbel_sample_kernel at temperature 0 and _get_num_sampled_and_rejected_kernel have it.
        reading = batch.seq_lens[:rows] < prompts.gpu[batch.idx_mapping]
        sampled = torch.where(reading, 0, batch.seq_lens.new_ones(rows))
        rejected = torch.where(reading, 0, batch.cu_num_logits.diff() - sampled)
        tokens = torch.from_numpy(logits.float().numpy().argmax(1)).view(-1, 1)
        for tensor, wanted in ((found.sampled_token_ids, tokens), (found.num_sampled, sampled),
                               (found.num_rejected, rejected)):  # fmt: skip
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape) and torch.equal(tensor, wanted)
        assert found.logprobs_tensors is found.num_nans is found.sampling_mask_tensors is None


REFUSED: dict[str, SamplingParams] = {
    "random": SamplingParams(temperature=1.0),
    "nearly greedy": SamplingParams(temperature=0.1),
    "logprobs": SamplingParams(temperature=0.0, logprobs=0),
    "logprobs of tokens": SamplingParams(temperature=0.0, logprob_token_ids=[3]),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 1.0}),
    "allowed tokens": SamplingParams(temperature=0.0, allowed_token_ids=[3]),
    "presence penalty": SamplingParams(temperature=0.0, presence_penalty=0.5),
    "frequency penalty": SamplingParams(temperature=0.0, frequency_penalty=0.5),
    "repetition penalty": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "processor": SamplingParams(temperature=0.0, seed=7),
    "trace": SamplingParams(temperature=0.0, trace_decode_token_ids=[1, 2]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_request_that_wants_more_than_the_largest_logit_leaves_its_batch_to_vllm(
    stock: Callable[..., Any], what: str
) -> None:
    ours = JitmxSampler(stock(enable_trace_replay=True, custom_logits_processors=[Biased()]), torch.bfloat16)
    for slot in range(4):
        ours.add_request(slot, GREEDY)
    assert taken(ours, [2, 0, 3, 1])
    ours.add_request(3, REFUSED[what])
    assert not taken(ours, [2, 0, 3, 1]) and not taken(ours, [3])
    assert taken(ours, [2, 0, 1])
    ours.add_request(3, GREEDY)  # the slot has another request
    assert taken(ours, [3, 1])


def test_words_that_are_not_wanted_and_budgets_of_thinking_are_vllms(stock: Callable[..., Any]) -> None:
    made = stock()
    made.thinking_budget_state.add_request = lambda index, params: params.thinking_token_budget is not None
    ours = JitmxSampler(made, torch.bfloat16)
    bad = SamplingParams(temperature=0.0)
    bad._bad_words_token_ids = [[3, 4]]
    for slot, params in enumerate((GREEDY, bad, SamplingParams(temperature=0.0, thinking_token_budget=5))):
        ours.add_request(slot, params)
    assert [taken(ours, [slot]) for slot in range(3)] == [True, False, False]


def test_what_changes_nothing_for_a_greedy_request_is_jitmxs(stock: Callable[..., Any]) -> None:
    ours = JitmxSampler(stock(), torch.bfloat16)
    other: tuple[dict[str, Any], ...] = {"top_k": 5}, {"top_p": 0.5}, {"seed": 3}, {"min_p": 0.2}, {"max_tokens": 3}
    for slot, params in enumerate(other):
        ours.add_request(slot, SamplingParams(temperature=0.0, **params))
    assert taken(ours, [0, 1, 2, 3, 4])


def test_drafts_other_logits_and_slots_without_a_request_are_vllms(stock: Callable[..., Any]) -> None:
    ours = JitmxSampler(stock(), torch.bfloat16)
    assert not taken(ours, [0, 1])  # as in vLLM's own run before there are requests
    for slot in range(SLOTS):
        ours.add_request(slot, SamplingParams.for_sampler_warmup())
    assert not taken(ours, [0, 1])  # as in the second of them
    for slot in range(SLOTS):
        ours.add_request(slot, GREEDY)
    assert taken(ours, [0, 1]) and not taken(ours, [0, 1], num_draft_tokens=1)
    batch = batch_of([0, 1])
    assert ours(logits_of(2).float(), batch) == "stock"
    assert ours(logits_of(3), batch) == "stock"
    assert ours(logits_of(VOCAB)[:, :2].t(), batch) == "stock"
    padded = torch.cat([logits_of(2), torch.full((2, 28), 99.0, dtype=torch.bfloat16)], 1)
    with simulated_card.on_cpu("sm_90a"):
        found = ours(padded[:, :VOCAB], batch)
    assert torch.equal(found.sampled_token_ids[:, 0], torch.from_numpy(logits_of(2).float().numpy().argmax(1)))


def test_what_the_launch_cannot_take_is_vllms_and_said_once(host: Any, stock: Callable[..., Any]) -> None:
    ours = JitmxSampler(stock(), torch.bfloat16)
    ours.add_request(0, GREEDY)
    sampler._say_refused.cache_clear()
    for _ in range(2):
        assert not taken(ours, [0], idx_mapping=torch.zeros(1, dtype=torch.int32))
    (line,) = [text for level, text in host.said if level == "WARNING"]
    assert line.startswith("vLLM samples a greedy batch that jitmx was to: logits are bfloat16 [1, 100]")
    assert taken(ours, [0])


def test_it_has_the_state_of_the_sampler_that_vllm_made(stock: Callable[..., Any]) -> None:
    made = stock()
    made.add_request(0, REFUSED["logprobs"])
    ours = JitmxSampler(made, torch.bfloat16)
    for name, value in vars(made).items():
        assert getattr(ours, name) is value
    assert ours.get_logprobs_dims(np.array([0])) == (0, 0) and isinstance(ours, Sampler)


def state_of(host: Any, model: Any) -> Any:
    """The state that vLLM makes of a model."""
    config = model.vllm_config
    cls = resolve_model_state_cls(config, model)
    with vllm_world.world(), set_current_vllm_config(config):
        return cls(config, model, None, HOST)


SAYS = "jitmx takes the tokens of batches whose requests are all greedy on sm_90a, in one launch"


def said(host: Any) -> list[str]:
    return [text for _, text in host.said if "tokens of" in text]


def test_a_model_that_jitmx_serves_has_its_sampler(host: Any, stock: Callable[..., Any]) -> None:
    state = state_of(host, host.build())
    assert isinstance(state, default.DefaultModelState) and type(state).__name__ == "JitmxDefaultModelState"
    made = stock()
    ours, rejection = state.custom_sampler(made)
    assert type(ours) is JitmxSampler and ours.sampling_states is made.sampling_states and rejection is None
    assert host.warmed[-1] == Needed("sm_90a", None, SLOTS, VOCAB, "bf16") and said(host) == [SAYS]
    assert taken(ours, [0]) is False
    ours.add_request(0, GREEDY)
    assert taken(ours, [0])


@pytest.mark.parametrize(
    ("options", "environ", "why"),
    [
        ({"greedy_sampler": False}, {}, "additional_config's greedy_sampler asks for vLLM's sampler"),
        ({}, {"JITMX_GREEDY_SAMPLER": "0"}, "JITMX_GREEDY_SAMPLER asks for vLLM's sampler"),
        ({}, {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT is set"),
        ({"mxfp4_layers": "none"}, {}, None),
    ],
)
def test_vllms_sampler_stays_where_it_is_asked_for(
    host: Any, stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, options: Any, environ: Any, why: str | None
) -> None:
    state = state_of(host, host.build())  # no one else can serve its experts on this machine
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    settings.reload()
    monkeypatch.setitem(state.vllm_config.additional_config, "jitmx", options)
    assert state.custom_sampler(stock()) is None
    assert not any(isinstance(one, Needed) for one in host.warmed)
    if why is None:
        assert said(host) == []
    else:
        (line,) = said(host)
        assert line.startswith(f"vLLM samples the tokens of every batch: {why}")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"compute_nans": True}, "NaN are counted"),
        ({"return_sampling_mask": True}, "sampling masks are returned"),
        ({"changed": ("Sampler.__call__",)}, r"another than jitmx knows (Sampler.__call__)"),
        ({"head_dtype": torch.float64}, "logits in torch.float64 are none of jitmx's"),
        ({"class": None}, "vLLM samples by Watermarked"),
    ],
)
def test_vllms_sampler_stays_where_jitmx_cannot_do_what_it_does(
    host: Any, stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    state, made = state_of(host, host.build()), stock()
    for name, value in changes.items():
        if name == "changed":
            monkeypatch.setattr(sampler, name, lambda value=value: value)
        elif name == "head_dtype":
            monkeypatch.setattr(type(state.vllm_config.model_config), name, value)
        elif name == "class":
            made.__class__ = type("Watermarked", (Sampler,), {})
        else:
            setattr(made, name, value)
    assert state.custom_sampler(made) is None and not any(isinstance(one, Needed) for one in host.warmed)
    assert why in said(host)[0]


def test_a_sampler_that_a_model_state_has_of_its_own_stays(
    host: Any, stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = object(), object()
    monkeypatch.setattr(default.DefaultModelState, "custom_sampler", lambda self, made: own)
    assert state_of(host, host.build()).custom_sampler(stock()) is own
    assert said(host) == ["vLLM samples the tokens of every batch: the model has a sampler of its own"]


def test_a_gpt_oss_that_jitmx_does_not_serve_keeps_vllms_sampler(host: Any, stock: Callable[..., Any]) -> None:
    model = host.build()
    state = state_of(host, model)
    model.vllm_config.quant_config = None
    assert state.custom_sampler(stock()) is None and said(host) == []


def test_vllms_choice_of_a_state_is_what_jitmx_adds_to(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = host.build()
    assert resolve_model_state_cls(model.vllm_config, model).__mro__[3] is default.DefaultModelState
    monkeypatch.setattr(type(model.vllm_config.model_config), "is_hybrid", True)
    assert resolve_model_state_cls(model.vllm_config, model).__mro__[3].__name__ == "MambaHybridModelState"


def test_where_a_hook_has_moved_vllms_sampler_stays_and_the_layers_are_jitmxs(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = hooks.Hook("vllm.v1.worker.gpu.sample.sampler", "Sampler.gone")
    monkeypatch.setattr(hooks, "SAMPLER_HOOKS", (*hooks.SAMPLER_HOOKS, gone))
    model = host.build()
    assert not hasattr(model, "get_model_state_cls")
    (line,) = said(host)
    assert "incompatible vLLM internals" in line and "Sampler.gone is gone" in line
    assert any("jitmx serves moe" in text for _, text in host.said)


def test_another_plugins_choice_of_a_state_stays(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    monkeypatch.setattr(GptOssForCausalLM, "get_model_state_cls", lambda model: int, raising=False)
    assert resolve_model_state_cls(None, host.build()) is int


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, True), ({"greedy_sampler": "0"}, False), ({"mxfp4_layers": "none"}, False),
     ({"mxfp4_layers": "none", "attention": "on"}, True)],
)  # fmt: skip
def test_warm_up_makes_its_kernel_where_jitmx_serves_anything(options: dict[str, Any], wanted: bool) -> None:
    asked = requested(options, environ={})
    assert asked.samples is wanted
    found = list(Needed("sm_90a", None, 1024, 201_088, "bf16").every(arch.parse("sm_90a"), 132))
    assert {variant.name for variant in found} == {"sampling.greedy"}


K = 2  # drafts of a request at most


def verifying(slots: list[int], drafts: list[list[int]], prompts: Any) -> InputBatch:
    """A batch that verifies so many drafts of each request, behind its last token."""
    each = np.array([len(own) + 1 for own in drafts])
    starts = np.concatenate([[0], each.cumsum()]).astype(np.int32)
    rows = int(starts[-1])
    made = batch_of(slots)
    tokens = torch.tensor([token for own in drafts for token in (1, *own)], dtype=torch.int32)
    lengths = torch.tensor([int(prompts[slot]) + len(own) + 1 for slot, own in zip(slots, drafts, strict=True)])
    return dataclasses.replace(
        made, num_draft_tokens=rows - len(slots), input_ids=tokens, logits_indices=torch.arange(rows),
        positions=torch.arange(rows), cu_num_logits=torch.from_numpy(starts), cu_num_logits_np=starts,
        expanded_idx_mapping=torch.tensor(slots).repeat_interleave(torch.from_numpy(each)),
        expanded_local_pos=torch.cat([torch.arange(count) for count in each]).int(), seq_lens=lengths.int(),
    )  # fmt: skip


@pytest.fixture
def rejection(stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Makes what verifies, for requests in all slots; vLLM's says "stock", and its gathering is plain torch."""
    monkeypatch.setattr(RejectionSampler, "__call__", lambda self, *given: "stock")
    monkeypatch.setattr(
        rejection_sampler, "gather_draft_sampled", lambda ids, positions, at, *rest: (ids[at], positions[at])
    )

    def make() -> Any:
        ours = JitmxSampler(stock(), torch.bfloat16)
        for slot in range(SLOTS):
            ours.add_request(slot, GREEDY if slot else SamplingParams(temperature=0.5))
        return sampler.JitmxRejectionSampler(ours, RejectionSampler(ours, speculation_of(), HOST))

    return make


def speculation_of(**more: Any) -> Any:
    usual = {"num_speculative_tokens": K, "enable_adaptive_verification": False, "rejection_sample_method": "standard",
             "fly_entropy_threshold": 0.3, "fly_entropy_top_k": 3}  # fmt: skip
    return SimpleNamespace(**usual | more)


def test_drafts_of_a_greedy_batch_are_accepted_up_to_the_first_that_is_not_what_the_target_says(
    rejection: Callable[[], Any],
) -> None:
    ours = rejection()
    prompts = ours.sampler.req_states.prefill_len
    prompts.np[:] = 3
    prompts.copy_to_uva()
    logits = logits_of(8, 5)
    right = logits.float().argmax(1).tolist()
    # All right; the first wrong; the second wrong; none drafted: rows 0-2, 3-4, 5-6 and 7.
    slots, drafts = [4, 2, 9, 7], [right[0:2], [right[3] + 1], [right[5]], []]
    drafts[2] = [right[5]]
    with simulated_card.on_cpu("sm_90a") as card:
        found = ours(logits, verifying(slots, drafts, prompts.np))
    assert card.kernels == ["sampling.greedy", "tree.accept"]
    assert found.num_sampled.tolist() == [3, 1, 2, 1] and found.num_rejected.tolist() == [0, 1, 0, 0]
    wanted = [right[0:3], right[3:4], right[5:7], right[7:8]]
    rows = found.sampled_token_ids.tolist()
    assert [row[: len(own)] for row, own in zip(rows, wanted, strict=True)] == wanted
    assert found.sampled_token_ids.shape == (4, K + 1) and found.logprobs_tensors is None


def test_a_request_that_is_still_being_read_gets_no_token_of_its_drafts(rejection: Callable[[], Any]) -> None:
    ours = rejection()
    prompts = ours.sampler.req_states.prefill_len
    prompts.np[:] = 3
    prompts.copy_to_uva()
    batch = verifying([4, 5], [[1], [2]], prompts.np)
    prompts.np[4] = 64
    prompts.copy_to_uva()
    with simulated_card.on_cpu("sm_90a"):
        found = ours(logits_of(4), batch)
    assert found.num_sampled.tolist()[0] == 0 and found.num_rejected.tolist()[0] == 0


def test_a_batch_that_asks_for_more_is_verified_by_vllm(rejection: Callable[[], Any]) -> None:
    ours = rejection()
    prompts = ours.sampler.req_states.prefill_len
    batch, logits = verifying([4, 5], [[1], [2]], prompts.np), logits_of(4)
    with simulated_card.on_cpu("sm_90a") as card:
        assert ours(logits, verifying([4, 0], [[1], [2]], prompts.np)) == "stock"  # one is drawn at random
        assert ours(logits, batch, None, torch.ones(4, dtype=torch.bool)) == "stock"  # a grammar cuts drafts off
        assert ours(logits.float(), batch) == "stock"
        assert ours(logits[:3], batch) == "stock"
        assert card.kernels == [] and ours(logits, batch) != "stock"


@pytest.mark.parametrize(
    ("more", "why"),
    [({}, ""), ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.2]}, "synthetic"),
     ({"enable_adaptive_verification": True}, "adaptive")],
)  # fmt: skip
def test_drafts_of_an_engine_are_verified_by_jitmx_unless_by_another_rule(
    host: Any, stock: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], why: str
) -> None:
    sampler._say_verifies.cache_clear()
    state = state_of(host, host.build())
    monkeypatch.setattr(state.vllm_config, "speculative_config", speculation_of(**more))
    ours, rejects = state.custom_sampler(stock())
    assert type(ours) is JitmxSampler and rejects.sampler is ours
    assert (type(rejects) is sampler.JitmxRejectionSampler) is (not why)
    kernels = [item for item in host.warmed if isinstance(item, Acceptance)]
    assert len(kernels) == (not why)
    (line,) = (text for _, text in host.said if "verifies" in text)
    assert why in line
    if kernels:
        names = {variant.name for variant in kernels[0].every(arch.parse("sm_90a"), 132)}
        assert names == {"sampling.greedy", "tree.accept"}
