"""jitmx in vLLM: experts, and where asked QKV, O and the language-model head, of gpt-oss on jitmx's kernels.

`register` is what vLLM calls in each of its processes (entry point `vllm.general_plugins`). It registers a name and
imports no more than vLLM has imported by then; what takes over which layer is decided when a gpt-oss model is built.

    plugin.py        what is registered, and the configuration that decides for each layer
    quantization.py  what that configuration answers, layer by layer
    log.py           the logger
    versions.py      which vLLM this is for
    hooks.py         everything of vLLM that is relied on, with signatures
    request.py       what was asked for
    policy.py        which layers, from that and what stands against it; knows nothing of vLLM
    facts.py         what stands against it, read from vLLM's configuration
    compiled.py      what vLLM's key for compiled code is told of it
    moe.py           the experts
    linear.py        QKV and O
    lm_head.py       the language-model head
    attention.py     attention to the paged cache, as a backend of vLLM
    sampler.py       tokens of greedy batches, and which drafts these accept
    replay.py        what a step need not prepare where its graph is replayed
    router.py        the router's product, taken into the experts' call
    block.py         the transformer block, whose norms and residual are in its products
    products.py      those products (jitmx.serving), as operators
    packing.py       experts' weights, packed in the place of the checkpoint's
    draft.py         an Eagle3 draft model: its layers, its attention, the tokens that its head proposes
    draft_config.py  the quantization configuration of that draft
    speculation.py   what vLLM does around it: its head, its tokens, which are accepted
    aux_layers.py    which of the target's states it reads
    warmup.py        the kernels that layers launch (jitmx.serving), compiled and loaded before serving begins
    ahead.py         the same, begun while weights are loaded
    monitor.py       what was loaded after that
"""

from __future__ import annotations


def register() -> None:
    """Register jitmx with the vLLM of this process. Calling it again changes nothing."""
    from jitmx.vllm import plugin

    plugin.register()
