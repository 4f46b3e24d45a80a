"""Timing: benchmarks of each operator, other libraries beside it, rooflines, and tuning runs."""
