"""The argument struct of every kernel of `routing`."""

from __future__ import annotations

from jitmx.registry.arguments import Arguments, number, reads, writes

ARGUMENTS = Arguments(
    "RoutingArguments",
    reads("x", "[m, h], or logits [m, experts]"),
    reads("weight", "[experts, h]"),
    reads("bias", "[experts]"),
    reads("norm", "[h]"),
    reads("map", "[experts]: id to local id, or -1", "int"),
    writes("ids", "[m, k]; given to the kernel that only sorts", "int"),
    writes("weights", "[m, k]", "float"),
    writes("pairs", "[m * k]: token * k + slot, by expert; -1 past the last", "int"),
    writes("offsets", "[local + 1]: where each expert's list starts", "int"),
    writes("schedule", "[capacity]: expert, first row, rows, number among its expert's tiles", "Vec4"),
    writes("tiles", "[1]: how many", "int"),
    number("local", "int", "experts that are here"),
    number("capacity", "int", "tiles of the schedule, at most"),
    writes("normalized", "[m, h]: RMSNorm of x"),
    writes("workspace", "counters, zero before the first launch, then partial logits"),
    number("epsilon", "float", "of the norm"),
    number("m", "int"),
    number("h", "int"),
)
