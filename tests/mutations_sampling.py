"""Faults of `sampling`: which value is the largest, where several are, at the ends of rows, and how blocks meet."""

from __future__ import annotations

from mutation import catalogue, variant

_SMALL = {"block": 128, "vectors": 2, "parts": 4}

VARIANTS = {
    "greedy-cluster": variant("sampling", "greedy", "sm_90a", **_SMALL),
    "greedy-workspace": variant("sampling", "greedy", "sm_121a", dtype="fp16", cluster=False, **_SMALL),
    "greedy-whole": variant("sampling", "greedy", "sm_90a"),
    "greedy-fp32": variant("sampling", "greedy", "sm_80", dtype="fp32", cluster=False, pdl=False, **_SMALL),
}

# Of every variant: what a thread finds in its vectors.
_VALUES = (
    ("the last of equals is kept", "!(value <= best)", "!(value < best)"),
    ("a NaN is the largest", "i < end && value == value && !(value <= best)", "i < end && !(value <= best)"),
    ("nothing is larger than NaN", "!(value <= best)", "value > best"),
    ("vectors behind the end count", "if (i < end && value == value", "if (value == value"),
    ("the last of equals in a vector", "for (u32 j = kWidth; j-- > 0u;)", "for (u32 j = 0; j < kWidth; ++j)"),
    ("a vector is found by the last round's place", "        at = i;", "        at = next;"),
    ("the vector that is kept is the first", "        held = loaded[j];", "        held = loaded[0];"),
    ("a round of vectors is missed", "next += kVectors * kThreads;", "next += (kVectors + 1u) * kThreads;"),
    ("only one round", "if (next - thread >= end) break;", "break;"),
    ("indices lack what is before the first vector", "ranked(best, head + index)", "ranked(best, index)"),
    ("a vector's first value is found", "index = at * kWidth + j;", "index = at * kWidth;"),
    ("values before the first vector are missed", "(thread < kWidth ? head : tail)", "(thread < kWidth ? 0u : tail)"),
    ("values behind the last vector are missed", "(thread < kWidth ? head : tail)", "(thread < kWidth ? head : 0u)"),
    ("one value of the end is missed", "(thread < kWidth ? head : tail)) rank",
     "(thread < kWidth ? head : tail) - 1u) rank"),
    ("the end begins a value early", "vocab - tail + j;", "vocab - tail - 1u + j;"),
    ("rows follow one another", "u64(row) * args.stride", "u64(row) * args.vocab"),
    ("short rows have a start beyond them", "min(vocab, u32(-(long long)logits & 15) / u32(sizeof(Value)))",
     "u32(-(long long)logits & 15) / u32(sizeof(Value))"),
    ("rows start on 16 bytes", "u32(-(long long)logits & 15) / u32(sizeof(Value))", "0u"),
    ("parts leave a vector", "u32(u64(all) * (part + 1) >> shift);",
     "u32(u64(all) * (part + 1) >> shift) - (part < 1u);"),
    ("both zeros are two values", "__float_as_uint(value + 0.f)", "__float_as_uint(value)"),
    ("a NaN ranks by its bits", "value != value ? 0u : bits", "value != value && bits == 0u ? 0u : bits"),
    ("a warp's index is any lane's", "key == most ? u32(rank) : 0u", "u32(rank)"),
    ("the shortest prompt counts", "length < prompt ? 0 : 1", "length <= prompt ? 0 : 1"),
    ("a request is found by its row", "args.prompts[request]", "args.prompts[row]"),
    ("every block counts", "part == 0 && thread == kThreads - 32 &&", "thread == kThreads - 32 &&"),
    ("a rejected token", "args.num_rejected[row] = 0;", "args.num_rejected[row] = 1;"),
)  # fmt: skip

_WHOLE = (
    ("only the first warps' ranks", "for (u32 first = 0; first < kSlots; first += 32)",
     "for (u32 first = 0; first < 1; first += 32)"),
    ("a round of ranks is missed", "for (u32 first = 0; first < kSlots; first += 32)",
     "for (u32 first = 0; first < kSlots; first += 64)"),
    ("only the first half of the vectors", "        held = loaded[j];", "        held = loaded[j & 3u];"),
)  # fmt: skip

_WORKSPACE = (
    ("warps do not wait for each other", "  if (lane == 0) slots[warp] = rank;\n  __syncthreads();\n",
     "  if (lane == 0) slots[warp] = rank;\n"),
    ("a rank stays for the next launch", "rank = atomicExch(most, 0ull);", "rank = *most;"),
    ("a rank stays where another block than the first is the last to come", "rank = atomicExch(most, 0ull);",
     "rank = part < 1u ? atomicExch(most, 0ull) : atomicMax(most, 0ull);"),
    ("a rank stays where the first block is the last to come", "rank = atomicExch(most, 0ull);",
     "rank = part > 0u ? atomicExch(most, 0ull) : atomicMax(most, 0ull);"),
    ("the first row's rank stays for the next launch", "rank = atomicExch(most, 0ull);",
     "rank = row > 0u ? atomicExch(most, 0ull) : atomicMax(most, 0ull);"),
    ("the first block to come is the last", "== blocks - 1u;", "== 0u;"),
    ("a count of one block less", "(most + 1), 1u << shift", "(most + 1), (1u << shift) - 1u"),
    ("rows share a rank", "static_cast<u64*>(args.workspace) + 2 * u64(row)", "static_cast<u64*>(args.workspace)"),
    ("a block's rank is missing", "    atomicMax(most, rank);\n", "    if (part < 1u) atomicMax(most, rank);\n"),
    ("a block that has lost two exchanges gives up", "    atomicMax(most, rank);\n",
     "    u64 seen = 0, was;\n"
     "    for (int i = 0; i < 2 && (was = atomicCAS(most, seen, rank)) != seen && was < rank; ++i) seen = was;\n"),
    ("a rank that is no longer there is cleared", "    atomicMax(most, rank);\n",
     "    atomicMax(most, rank);\n    const u64 seen = atomicMax(most, 0ull);\n"
     "#define atomicExch(address, zero) atomicCAS(address, seen, zero)\n"),
    ("blocks count without order", "atom.acq_rel.gpu.global.inc.u32", "atom.relaxed.gpu.global.inc.u32"),
)  # fmt: skip

_CLUSTER = (
    ("a block of the row may not have begun", "  cluster_wait();  // all blocks of the row have begun\n", ""),
    ("nothing is waited for before ranks are read", "  if (part > 0 || warp > 0) return;\n  cluster_wait();\n",
     "  if (part > 0 || warp > 0) return;\n"),
    ("ranks are told of without order", "  cluster_arrive_release();\n  if (counts)",
     "  cluster_arrive_relaxed();\n  if (counts)"),
    ("ranks are kept in each block", "cluster_address(shared_address(slots + part * kWarps + warp), 0)",
     "shared_address(slots + part * kWarps + warp)"),
    ("blocks share their slots", "slots + part * kWarps + warp", "slots + warp"),
    ("slots of the last block are missed", "filled = kWarps << shift", "filled = (kWarps << shift) - kWarps"),
    ("parts are as long as each other", "end = u32(u64(all) * (part + 1) >> shift)",
     "end = u32((u64(all) >> shift) * (part + 1))"),
    ("logits are read before they are there", "  wait_for_previous();\n", ""),
)  # fmt: skip

MUTATIONS = catalogue(VARIANTS, {
    "greedy-cluster": (
        *_VALUES, *_CLUSTER,
        ("values below the smallest normal number are zeros", "__float_as_uint(value + 0.f)",
         "__float_as_uint(fabsf(value) < 1.17549435e-38f ? 0.f : value + 0.f)"),
    ),
    "greedy-workspace": _VALUES + _WORKSPACE + (
        ("the end has as many values as if the row began with a vector",
         "tail = (vocab - head) % kWidth;", "tail = vocab % kWidth;"),
    ),
    "greedy-whole": _WHOLE,
    "greedy-fp32": (
        *_VALUES[:7], *_VALUES[10:16], *_WORKSPACE[:8],
        ("neighbours of fp32 are equal", "u64(key) << 32 | (0xFFFFFFFFu - index)",
         "u64(key) << 31 | (0xFFFFFFFFu - index)"),
        ("neighbours change places", "0xFFFFFFFFu : 0x80000000u)", "0xFFFFFFFFu : 0x80000001u)"),
        ("neighbours below 0 change places", "0xFFFFFFFFu : 0x80000000u)", "0xFFFFFFFEu : 0x80000000u)"),
        ("small values are alike", "__float_as_uint(value + 0.f)", "__float_as_uint(value + 0.5f)"),
    ),
})  # fmt: skip

ESCAPES: tuple[tuple[str, str], ...] = ()
