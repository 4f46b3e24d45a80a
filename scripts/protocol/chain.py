"""Random weights whose greedy text is certain: behind each token comes the next number.

What random weights say next is a matter of rounding. In one block of some the router's logits of the last expert chosen
and of the next are nearly equal, a kernel that rounds differently takes the other one, and the blocks behind it make
another token of that. So texts of two engines part after a few tokens, and even those of the first row of a step and of
the second. Nothing that was recorded then says which draft is right. Here a token's embedding is the head's row of the
next number, and so loud that no block changes which logit is the largest: the right draft is known in advance, whatever
serves the model. Experts are still drawn anew for each token and block, by random routers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jitmx.errors import InputError

if TYPE_CHECKING:
    import torch

# Root mean square of an embedding. What random blocks add to it has 1 a block, and 36 at most in all.
LOUD = 32.0
_ROUTER = 0.02  # spread of a router's weights
_ROWS = 8  # of the head that are read at a time: as many as an engine for small batches has kernels for
_BLOCK = 20  # drafts of which the asked part is right, as exactly as whole ones can be


def write(model: Any) -> None:
    """Give norms, routers and embeddings of a model these values, in place; its head keeps its own.

    Args:
        model: vLLM's, whose head is random. It may be quantized: it is read by what it makes of unit vectors.
    """
    import torch

    with torch.inference_mode():
        _write(model)


def _write(model: Any) -> None:
    import torch

    torch.manual_seed(0)
    embedding: torch.Tensor | None = None
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            continue
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif "embed" in name:
            embedding = parameter.data
        elif "router" in name and parameter.dim() == 2:
            parameter.data.normal_(0, _ROUTER)
        elif "router" in name:
            parameter.data.zero_()
    assert embedding is not None, "a language model has an embedding"
    hidden = embedding.shape[1]
    for first in range(0, hidden, _ROWS):
        units = torch.eye(_ROWS, dtype=embedding.dtype, device=embedding.device)[: hidden - first]
        rows = torch.nn.functional.pad(units, (first, hidden - first - _ROWS))
        logits = model.compute_logits(rows)
        embedding[: logits.shape[1], first : first + _ROWS] = logits.roll(-1, 1).T
    for some in embedding.split(1 << 12):
        values = some.float()
        some.copy_(values * (LOUD / values.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-30)))


def prompts(vocabulary: int, count: int, tokens: int, behind: int) -> list[list[int]]:
    """So many prompts, the same whenever, each with room for a text of `behind` tokens; wrong drafts are higher ones.

    Raises:
        InputError: a vocabulary that has no such room.
    """
    draw, end = random.Random(0), vocabulary // 2 - behind
    if end < 1:
        raise InputError(
            f"{vocabulary} tokens have no room for texts of {behind}, which count up in the lower half; give a model "
            f"of {2 * behind + 2} tokens or more"
        )
    return [[draw.randrange(vocabulary) for _ in range(tokens - 1)] + [draw.randrange(end)] for _ in range(count)]


def text(prompt: Sequence[int], tokens: int) -> list[int]:
    """So many tokens that come behind a prompt."""
    return [prompt[-1] + 1 + at for at in range(tokens)]


def accepted(rate: float, steps: int, rounds: int, draw: random.Random) -> list[int]:
    """How many of its `steps` drafts each of so many rounds has right before one is wrong.

    Each draft that is looked at is right with the chance `rate`, in random order, and of 20 of one place that part is
    as exactly as can be: a run of some hundred tokens then has the acceptance that was asked for.
    """
    places = [_shuffled(rate, draw) for _ in range(steps)]
    found = []
    for _ in range(rounds):
        right = 0
        while right < steps and next(places[right]):
            right += 1
        found.append(right)
    return found


def _shuffled(rate: float, draw: random.Random) -> Iterator[bool]:
    block = 0
    while True:
        right = round((block + 1) * _BLOCK * rate) - round(block * _BLOCK * rate)
        some = [True] * right + [False] * (_BLOCK - right)
        draw.shuffle(some)
        yield from some
        block += 1


class Proposals:
    """What takes the place of a speculator's `propose`: it counts, and its tokens are those of the text.

    The draft's kernels run first. Two small launches are added to a step.

    Args:
        propose: the speculator's, bound.
        rate: chance that a token is right where those before it are; None: tokens are the draft's own.
        steps: tokens proposed a step.
        requests: at a time, at most.
        vocabulary: tokens of the target.
        seed: the same one gives the same drafts.
        rounds: steps of one run; behind these it begins again.

    Attributes:
        verified: steps that looked at drafts.
        looked_at: the same, counted for each of their requests.
    """

    # Where `last_sampled` is among the arguments behind the batch.
    LAST_SAMPLED = 6

    def __init__(
        self, propose: Callable[..., torch.Tensor], rate: float | None, *, steps: int, requests: int, vocabulary: int,
        device: torch.device | str, seed: int = 0, rounds: int = 1024,
    ) -> None:  # fmt: skip
        self._propose, self._steps, self._at = propose, steps, 0
        self.verified = self.looked_at = 0
        self._ahead: torch.Tensor | None = None
        if rate is not None:
            import torch

            draw = random.Random(seed)
            right = torch.tensor([accepted(rate, steps, rounds, draw) for _ in range(requests)]).T  # [rounds, requests]
            places = torch.arange(steps)
            wrong = (places >= right.unsqueeze(2)) * (vocabulary // 2)
            self._ahead = (places + 1 + wrong).to(device)  # [rounds, requests, steps], from the last token on

    def __call__(self, batch: Any, *given: Any, **more: Any) -> torch.Tensor:
        """The drafts of a batch, [requests, steps]."""
        own = self._propose(batch, *given, **more)
        verifies = batch.num_draft_tokens > 0
        self.verified += verifies
        self.looked_at += batch.num_draft_tokens // self._steps
        self._at = self._at + 1 if verifies else 0  # behind a prompt the same drafts as behind the one before
        if self._ahead is None:
            return own
        last = more["last_sampled"] if "last_sampled" in more else given[self.LAST_SAMPLED]
        requests = batch.idx_mapping[: batch.num_reqs]
        ahead = self._ahead[self._at % len(self._ahead), : batch.num_reqs]
        return last[requests] + ahead
