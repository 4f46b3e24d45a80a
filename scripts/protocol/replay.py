"""What a benchmark of speculation asks of vLLM's worker: a text that is known, chosen acceptance, times of its graphs.

A replay drafter runs the draft's kernels, and then its tokens are those of the known text (`chain`), each right with a
chosen chance. Routing of the target is then that of the tokens that it accepts, as it is not where acceptance is drawn
by vLLM ("synthetic"), and no equality between runs or engines is relied on.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scripts.protocol import chain

if TYPE_CHECKING:
    import torch

# What vLLM's worker is mixed with: `worker_extension_cls` of the engine.
EXTENSION = "scripts.protocol.replay.Replay"


class Replay:
    """Methods of a worker, for `LLM.collective_rpc`."""

    model_runner: Any

    def chain(self) -> None:
        """Give the target, whose weights are random, the text that `scripts.protocol.chain` knows."""
        chain.write(self.model_runner.model)

    def replay(self, rate: float | None, seed: int = 0) -> None:
        """From now on drafts are those of the known text; each is right with this chance where those before are.

        Args:
            rate: None: drafts are the draft's own.
        """
        runner = self.model_runner
        speculator = runner.speculator
        vars(speculator).pop("propose", None)
        speculator.propose = chain.Proposals(
            speculator.propose, rate, steps=runner.num_speculative_steps, requests=runner.max_num_reqs,
            vocabulary=runner.model_config.get_vocab_size(), device=runner.device, seed=seed,
        )  # fmt: skip

    def verified(self) -> tuple[int, int]:
        """Since `replay`: steps that looked at drafts, and the same counted for each of their requests."""
        proposals = self.model_runner.speculator.propose
        return proposals.verified, proposals.looked_at

    def synthetic(self, rates: list[float]) -> None:
        """From now on vLLM accepts the first 1, 2 ... of each proposal with these chances; none: what is right."""
        import torch
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import unconditional_to_conditional_rates

        sampler = self.model_runner.rejection_sampler
        chances = unconditional_to_conditional_rates(rates) if rates else None
        device = self.model_runner.device
        sampler.synthetic_conditional_rates = (
            None if chances is None else torch.tensor(chances, dtype=torch.float32, device=device)
        )

    def graphs(self, tokens: int, times: int = 20) -> list[dict[str, Any]]:
        """Milliseconds of each captured graph of up to so many tokens, replayed back to back: the median of five."""
        return [
            about | {"ms": round(statistics.median(_milliseconds(graph, times) for _ in range(5)), 4)}
            for about, graph in self._captured(tokens)
        ]

    def kernels(self, tokens: int, times: int = 8) -> list[dict[str, Any]]:
        """Of each of these graphs of one request what it launches: how often, microseconds of each, and its name."""
        from torch.profiler import ProfilerActivity, profile

        found = []
        for about, graph in self._captured(tokens):
            if about["requests"] != 1:
                continue
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                _milliseconds(graph, times)
            spent: dict[str, list[float]] = {}
            for event in seen.events():
                if event.device_type.name == "CUDA":
                    spent.setdefault(event.name, []).append(event.device_time_total)
            found.append(about | {
                "us": round(sum(map(sum, spent.values())) / times, 2),
                "launches": [
                    f"{len(each) / times:g} x {statistics.median(each):.2f} {name[:80]}"
                    for name, each in sorted(spent.items(), key=lambda item: -sum(item[1]))
                ],
            })  # fmt: skip
        return found

    def _captured(self, tokens: int) -> Iterator[tuple[dict[str, Any], torch.cuda.CUDAGraph]]:
        """Captured graphs of up to so many tokens, each with what it is."""
        runner = self.model_runner
        managers = {"target": runner.cudagraph_manager}
        if runner.speculator is not None:
            managers |= {
                "draft, first step": runner.speculator.prefill_cudagraph_manager,
                "draft, other steps": runner.speculator.decode_cudagraph_manager,
            }
        for name, manager in managers.items():
            for shape, graph in ({} if manager is None else manager.graphs).items():
                if shape.cg_mode.name == "FULL" and shape.num_tokens <= tokens and not shape.num_active_loras:
                    yield {"graph": name, "tokens": shape.num_tokens, "requests": shape.num_reqs}, graph


def _milliseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times
