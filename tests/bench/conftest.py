"""Benchmarks run on the card that operators have in tests."""

from ops.conftest import card, ptx  # noqa: F401
