"""What a benchmark of speculation asks of vLLM's worker: chosen acceptance, and the times of its graphs.

A replay drafter runs the draft's kernels, and then its tokens are those of a recorded greedy run.

Routing of the target is then that of real tokens, as it is not where acceptance is drawn by vLLM ("synthetic"): a token
that is accepted is the one that greedy decoding takes next, and one that is not is another.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

# What vLLM's worker is mixed with: `worker_extension_cls` of the engine.
EXTENSION = "scripts.protocol.replay.Replay"


class Record:
    """Greedy runs, found by the first token of their prompts.

    Args:
        runs: of each prompt its tokens and those behind them; no two begin alike.
        vocabulary: tokens of the target.
        device: where vLLM's tensors lie.
    """

    def __init__(self, runs: list[list[int]], vocabulary: int, device: torch.device) -> None:
        firsts = [run[0] for run in runs]
        if len(set(firsts)) < len(firsts):
            raise ValueError("two recorded runs begin with the same token, by which they are told apart")
        longest = max(map(len, runs))
        self.vocabulary = vocabulary
        self.tokens = torch.tensor([run + [0] * (longest - len(run)) for run in runs], device=device)
        self.row = torch.zeros(vocabulary, dtype=torch.int64, device=device)
        self.row[torch.tensor(firsts, device=device)] = torch.arange(len(runs), device=device)

    def drafts(
        self, firsts: torch.Tensor, known: torch.Tensor, steps: int, rate: float, generator: torch.Generator
    ) -> torch.Tensor:
        """Tokens that follow, each with this chance the right one: int64 [requests, steps].

        Args:
            firsts: [requests], first token of each.
            known: [requests], tokens of each so far, the one that was sampled last included.
        """
        device = self.tokens.device
        at = known[:, None].long() + torch.arange(steps, device=device)
        right = self.tokens[self.row[firsts.long()][:, None], at.clamp(max=self.tokens.shape[1] - 1)]
        wrong = torch.rand(right.shape, generator=generator, device=device) >= rate
        return torch.where(wrong, (right + 1) % self.vocabulary, right)


class Replay:
    """Methods of a worker, for `LLM.collective_rpc`."""

    model_runner: Any

    def replay(self, runs: list[list[int]], rate: float, seed: int = 0) -> None:
        """From now on drafts are those of the record; each is right with the chance `rate` where those before are.

        Args:
            runs: as for `Record`; none: drafts are the draft's own again.
        """
        runner = self.model_runner
        speculator, device = runner.speculator, runner.device
        if not runs:
            vars(speculator).pop("propose", None)
            return
        record = Record(runs, runner.model_config.get_vocab_size(), device)
        generator = torch.Generator(device=device).manual_seed(seed)
        propose = type(speculator).propose

        def replayed(input_batch: Any, *given: Any, **more: Any) -> torch.Tensor:
            drafts: torch.Tensor = propose(speculator, input_batch, *given, **more)
            rejected = more["num_rejected"] if "num_rejected" in more else given[5]
            count = input_batch.num_reqs
            firsts = runner.req_states.all_token_ids.gpu[input_batch.idx_mapping[:count], 0]
            known = input_batch.seq_lens[:count] - rejected[:count] + 1
            return record.drafts(firsts, known, drafts.shape[1], rate, generator).to(drafts.dtype)

        speculator.propose = replayed

    def synthetic(self, rates: list[float]) -> None:
        """From now on vLLM accepts the first 1, 2 ... of each proposal with these chances; none: what is right."""
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import unconditional_to_conditional_rates

        sampler = self.model_runner.rejection_sampler
        chances = unconditional_to_conditional_rates(rates) if rates else None
        device = self.model_runner.device
        sampler.synthetic_conditional_rates = (
            None if chances is None else torch.tensor(chances, dtype=torch.float32, device=device)
        )

    def graphs(self, tokens: int, times: int = 20) -> list[dict[str, Any]]:
        """Milliseconds of each captured graph of up to so many tokens, replayed back to back: the median of five."""
        runner = self.model_runner
        managers = {"target": runner.cudagraph_manager}
        if runner.speculator is not None:
            managers |= {
                "draft, first step": runner.speculator.prefill_cudagraph_manager,
                "draft, other steps": runner.speculator.decode_cudagraph_manager,
            }
        found = []
        for name, manager in managers.items():
            for shape, graph in ({} if manager is None else manager.graphs).items():
                if shape.cg_mode.name == "FULL" and shape.num_tokens <= tokens and not shape.num_active_loras:
                    taken = statistics.median(_milliseconds(graph, times) for _ in range(5))
                    found.append({
                        "graph": name, "tokens": shape.num_tokens, "requests": shape.num_reqs, "ms": round(taken, 4)
                    })  # fmt: skip
        return found


def _milliseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times
