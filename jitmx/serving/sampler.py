"""The kernel that takes the tokens of a served model's greedy batches, for who has it made before it is launched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jitmx.arch import Arch
from jitmx.dispatch.call import Launch
from jitmx.kernels.sampling import SamplingProblem
from jitmx.serving.needed import Needed, chosen


@dataclass(frozen=True)
class Sampler(Needed):
    """The next tokens of a batch of requests; `rows` are the most there are.

    Attributes:
        vocab, dtype: as in `SamplingProblem`.
    """

    vocab: int
    dtype: str

    def made(self, m: int, arch: Arch, multiprocessors: int) -> Iterator[Launch]:
        """One."""
        problem = SamplingProblem(m, self.vocab, self.dtype)
        yield chosen("sampling", problem, arch, multiprocessors)
