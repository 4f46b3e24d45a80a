"""The state of one memory barrier: its phase, what it lacks, the bytes that it expects.

A phase completes when no arrival is pending and the transaction count is zero; the next one then starts with the
expected count. Bytes may be reported before they are expected, within a phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jitmx.errors import SimulationError

LIMIT = (1 << 20) - 1


@dataclass
class Mbarrier:
    """One barrier.

    Attributes:
        expected: arrivals of the next phase.
        pending: arrivals that the current phase lacks.
        transactions: bytes that the current phase expects and has not seen; negative where they came first.
        phase: how many phases have completed.
    """

    expected: int
    pending: int = field(init=False)
    transactions: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.expected <= LIMIT:
            raise SimulationError(f"an mbarrier for {self.expected} arrivals; it must be 1 to {LIMIT}")
        self.pending = self.expected

    def expect(self, count: int) -> bool:
        """`count` more bytes are to come (expect_tx) or, negative, came (complete_tx); whether the phase completed."""
        self.transactions += count
        if abs(self.transactions) > LIMIT:
            raise SimulationError(f"the mbarrier's transaction count becomes {self.transactions}; its limit is {LIMIT}")
        return self._settle()

    def arrive(self, count: int = 1, *, expect: int = 0, drop: bool = False) -> tuple[int, bool]:
        """`count` arrivals after `expect` more bytes: the state before, and whether the phase completed.

        Args:
            drop: the next phases expect `count` arrivals less.
        """
        if not 1 <= count <= self.pending:
            raise SimulationError(
                f"{count} arrivals at an mbarrier whose phase lacks {self.pending} of {self.expected}"
            )
        token = self.token
        self.expect(expect)  # which completes nothing, with this arrival pending
        if drop:
            self.expected -= count
        self.pending -= count
        return token, self._settle()

    @property
    def token(self) -> int:
        """The state that arrive gives out: phase and pending count."""
        return self.phase << 20 | self.pending

    def passed(self, token: int) -> bool:
        """Whether the phase of `token` has completed.

        Raises:
            SimulationError: a state of two or more phases ago, of which nothing is known.
        """
        behind = self.phase - (token >> 20)
        if behind not in (0, 1):
            raise SimulationError(f"a wait for the state of phase {token >> 20} at an mbarrier in phase {self.phase}")
        return behind == 1

    def passed_parity(self, parity: int) -> bool:
        """Whether the phase of this parity, either the current one or the one before, has completed."""
        return self.phase & 1 != parity & 1

    def _settle(self) -> bool:
        if self.pending or self.transactions:
            return False
        self.phase += 1
        self.pending = self.expected
        return True

    @property
    def word(self) -> int:
        """The eight bytes in shared memory."""
        return (self.transactions & 0x1FFFFF) << 41 | (self.pending & LIMIT) << 21 | (self.phase & LIMIT) << 1 | 1
