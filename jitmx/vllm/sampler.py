"""The sampler of a model that jitmx serves: the tokens of a batch whose requests are all greedy are one launch, and
those of one that verifies drafts are three.

vLLM asks the model's state whether the sampler that it made is to be replaced. The one here has the state of that, and
hands on to its code every batch with a request that wants more than the largest logit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models import gpt_oss
from vllm.v1.worker.gpu import input_batch as batches
from vllm.v1.worker.gpu import model_states
from vllm.v1.worker.gpu.sample import gumbel, logprob, states, trace_replay
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from jitmx.errors import InputError
from jitmx.ops import sampling
from jitmx.ops.checks import DTYPES
from jitmx.ops.sampling import sample_requests
from jitmx.ops.tree.acceptance import accept_requests
from jitmx.serving import sampler as sampling_kernels
from jitmx.serving.draft import Acceptance
from jitmx.vllm import facts, hooks, warmup
from jitmx.vllm.log import logger
from jitmx.vllm.replay import Replays

# What vLLM's code was when this was written from it, by digest: whoever changes a step there has it back.
_KNOWN: dict[str, tuple[Any, str]] = {
    "Sampler.__call__": (Sampler.__call__, "80399e3a3b797cc6"),
    "Sampler.add_request": (Sampler.add_request, "0c946e58f33ada53"),
    "Sampler.sample": (Sampler.sample, "6b1dc2ac7d13b5a7"),
    "Sampler.apply_sampling_params": (Sampler.apply_sampling_params, "dd841a1ac152ef85"),
    "Sampler._sample_random": (Sampler._sample_random, "d9b2310d975272bc"),
    "Sampler.get_logprobs_dims": (Sampler.get_logprobs_dims, "67deb084dfaeb4fd"),
    "SamplingStates.add_request": (states.SamplingStates.add_request, "e26a810d7a929d57"),
    "LogprobTokenIdsState.add_request": (logprob.LogprobTokenIdsState.add_request, "0bba772c243f0ca9"),
    "TraceReplayState.add_request": (trace_replay.TraceReplayState.add_request, "9cf1a80d3fc8e0c0"),
    "gumbel_sample": (gumbel.gumbel_sample, "04f27df195a97ac3"),
    "gumbel_noised_argmax": (gumbel.gumbel_noised_argmax, "483ffb2118358279"),
    "get_num_sampled_and_rejected": (batches.get_num_sampled_and_rejected, "6c1cbdc95248972d"),
    "_get_num_sampled_and_rejected_kernel": (batches._get_num_sampled_and_rejected_kernel, "b48c635372eeade8"),
    "resolve_model_state_cls": (model_states.resolve_model_state_cls, "df63a96ec269ea22"),
}

# Likewise, of what verifies drafts.
_KNOWN_REJECTION: dict[str, tuple[Any, str]] = {
    "RejectionSampler.__init__": (RejectionSampler.__init__, "50e72eb5ab71b809"),
    "RejectionSampler.__call__": (RejectionSampler.__call__, "6463beaa4704b2fc"),
    "RejectionSampler._verify": (RejectionSampler._verify, "3de64f37b693a20e"),
    "gather_draft_sampled": (rejection_sampler.gather_draft_sampled, "a0468c10f8f7784e"),
    "_gather_draft_sampled_kernel": (rejection_sampler._gather_draft_sampled_kernel, "41c02943a2bd43be"),
    "rejection_sample": (rejection_sampler.rejection_sample, "b050b90ad9888f9f"),
}

_decide: Callable[[Any, str], bool] | None = None


class JitmxSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, by one launch where all requests of a batch are greedy and ask for nothing else.

    Args:
        stock: the sampler that vLLM made, whose place it takes.
        dtype: of the logits for which a kernel is ready; others are vLLM's.
    """

    def __init__(self, stock: Sampler, dtype: torch.dtype) -> None:
        self.__dict__.update(vars(stock))
        # By the slot of a request; vLLM's own runs with none in it are vLLM's, and warm its kernels.
        self.jitmx_greedy = np.zeros(len(stock.needs_logits_processing), dtype=bool)
        self.jitmx_dtype = dtype

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """A request takes a slot."""
        super().add_request(req_idx, sampling_params)
        trace = self.trace_replay_state
        self.jitmx_greedy[req_idx] = (
            self.sampling_states.temperature.np[req_idx] == 0.0
            and not self.needs_logits_processing[req_idx]
            and self.sampling_states.num_logprobs[req_idx] == NO_LOGPROBS
            and self.logprob_token_ids_state.num_token_ids.np[req_idx] == 0
            and (trace is None or trace.trace_len.np[req_idx] == 0)
        )

    def __call__(self, logits: torch.Tensor, input_batch: Any) -> SamplerOutput:
        """The tokens of a batch, and of each request how many it gets."""
        greedy = self.jitmx_greedy[input_batch.idx_mapping_np]
        if (
            b"\0" in greedy.tobytes()  # some are not: a tenth of the time of numpy's all()
            or input_batch.num_draft_tokens
            or logits.dtype is not self.jitmx_dtype
            or logits.shape[0] != len(greedy)
            or logits.stride(1) != 1
        ):
            return super().__call__(logits, input_batch)
        try:
            tokens, sampled, rejected = sample_requests(
                logits, input_batch.idx_mapping, input_batch.seq_lens, self.req_states.prefill_len.gpu
            )
        except InputError as error:  # nothing was launched
            _say_refused(str(error))
            return super().__call__(logits, input_batch)
        return SamplerOutput(tokens, None, None, sampled, rejected)


class JitmxRejectionSampler(RejectionSampler):  # type: ignore[misc]
    """vLLM's verification of drafts, by the largest logits where all requests of a batch are greedy.

    Args:
        sampler: jitmx's, which knows which requests are.
        stock: what vLLM verifies with, whose place it takes.
    """

    def __init__(self, sampler: JitmxSampler, stock: RejectionSampler) -> None:
        self.__dict__.update(vars(stock))
        self.sampler = sampler

    def __call__(
        self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None
    ) -> SamplerOutput:
        """The tokens of a batch, how many each request gets, and how many of its drafts are rejected."""
        own = self.sampler
        greedy = own.jitmx_greedy[input_batch.idx_mapping_np]
        if (
            b"\0" in greedy.tobytes()
            or invalid_drafts is not None  # a grammar ends before a draft does
            or self.synthetic_conditional_rates is not None
            or logits.dtype is not own.jitmx_dtype
            or logits.shape[0] != len(input_batch.logits_indices)
            or logits.stride(1) != 1
        ):
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        prompts = own.req_states.prefill_len.gpu
        drafts, _ = rejection_sampler.gather_draft_sampled(
            input_batch.input_ids, input_batch.positions, input_batch.logits_indices, input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos, prompts,
        )  # fmt: skip
        try:
            tokens, sampled, rejected = accept_requests(
                drafts, sampling.run(logits), input_batch.cu_num_logits, self.num_speculative_steps,
                input_batch.idx_mapping, input_batch.seq_lens, prompts,
            )  # fmt: skip
        except InputError as error:  # nothing that counts was launched
            _say_refused(str(error))
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        return SamplerOutput(tokens, None, None, sampled, rejected)


def _verifies(config: Any) -> str:
    """What stands against jitmx verifying the drafts of greedy batches, in words; empty where nothing."""
    asked = config.speculative_config
    against = hooks.changed(_KNOWN_REJECTION)
    checks = (
        (asked.rejection_sample_method == "standard", f"rejection_sample_method={asked.rejection_sample_method}"),
        (not asked.enable_adaptive_verification, "verification is adaptive"),
        (not against, f"vLLM's code that verifies is another than jitmx knows ({', '.join(against)})"),
    )  # fmt: skip
    return next((reason for fine, reason in checks if not fine), "")


@functools.cache
def _say_verifies(against: str) -> None:
    if against:
        logger.info("vLLM verifies the drafts of every batch: %s", against)
    else:
        logger.info("jitmx verifies the drafts of batches whose requests are all greedy")


@functools.cache
def _say_refused(why: str) -> None:
    logger.warning("vLLM samples a greedy batch that jitmx was to: %s", why)


class _GreedySampling:
    """What is put before the class of a model's state."""

    vllm_config: Any
    device: torch.device

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any] | None:
        """jitmx's sampler where the policy says so; else what vLLM has."""
        found: tuple[Any, Any] | None = super().custom_sampler(sampler)  # type: ignore[misc]
        config = self.vllm_config
        against = "the model has a sampler of its own" if found else _lacks(config, sampler)
        if _decide is None or not _decide(config, against):
            return found
        dtype = config.model_config.head_dtype
        arch, _ = facts.target()
        assert arch is not None, "nothing is served without a target"
        slots, vocab = len(sampler.needs_logits_processing), config.model_config.get_vocab_size()
        device, speculation = warmup.device_of(self.device), config.speculative_config
        warmup.prepare(sampling_kernels.Sampler(arch.name, device, slots, vocab, DTYPES[dtype]))
        ours = JitmxSampler(sampler, dtype)
        if speculation is None:
            return ours, None
        stock = RejectionSampler(ours, speculation, self.device)
        refused = _verifies(config)
        _say_verifies(refused)
        if refused:
            return ours, stock
        rows = slots * (speculation.num_speculative_tokens + 1)
        warmup.prepare(Acceptance(arch.name, device, rows, vocab, DTYPES[dtype]))
        return ours, JitmxRejectionSampler(ours, stock)


def install(decide: Callable[[Any, str], bool]) -> None:
    """Have vLLM ask here which state a gpt-oss model has. Another plugin's choice stays.

    Args:
        decide: whether greedy batches of an engine are jitmx's, by its VllmConfig and what stands against it, in words.
    """
    global _decide
    _decide = decide
    if not hasattr(gpt_oss.GptOssForCausalLM, "get_model_state_cls"):
        gpt_oss.GptOssForCausalLM.get_model_state_cls = _state_of


def _state_of(model: Any) -> type[Any]:
    """The class of a model's state: vLLM's choice, which asks jitmx for a sampler."""
    # vLLM chooses by the model's layers where the model itself has nothing to say.
    return _asking(model_states.resolve_model_state_cls(model.vllm_config, SimpleNamespace(modules=model.modules)))


@functools.cache
def _asking(stock: type[Any]) -> type[Any]:
    return type(f"Jitmx{stock.__name__}", (_GreedySampling, Replays, stock), {"__module__": __name__})


def _lacks(config: Any, sampler: Any) -> str:
    """What stands against a sampler in the place of this one, in words; empty where nothing."""
    dtype = config.model_config.head_dtype
    checks = (
        (type(sampler) is Sampler, f"vLLM samples by {type(sampler).__name__}"),
        (not getattr(sampler, "compute_nans", False), "NaN are counted (VLLM_COMPUTE_NANS_IN_LOGITS)"),
        (not getattr(sampler, "return_sampling_mask", False), "sampling masks are returned"),
        (dtype in DTYPES, f"logits in {dtype} are none of jitmx's"),
        (not changed(), f"vLLM's code of the sampler is another than jitmx knows ({', '.join(changed())})"),
    )
    return next((reason for fine, reason in checks if not fine), "")


@functools.cache
def changed() -> tuple[str, ...]:
    """Which functions that the sampler takes the place of, or reads from, are not as they were when it was written."""
    return hooks.changed(_KNOWN)
