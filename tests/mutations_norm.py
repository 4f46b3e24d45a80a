"""Faults of RMSNorm: what it waits for, what its warps share, the ends of rows, and its arithmetic (`mutation.py`)."""

from __future__ import annotations

from mutation import catalogue, variant

VARIANTS = {
    "norm-rms": variant("norm", "rms", "sm_90a"),
    "norm-rms-two": variant("norm", "rms", "sm_121a", dtype="fp16", block=128, vectors=2),
    "norm-rms-long": variant("norm", "rms", "sm_90a", block=1024, vectors=2),
    "norm-concat": variant("norm", "concat", "sm_90a"),
}

_WAIT = "  wait_for_previous();\n"
_FIRST = "  Vectors x = Vectors::load(args.x + u64(row) * args.stride, args.vectors);\n"
_NEXT = "if (more) x = Vectors::load(args.x + u64(next) * args.stride, args.vectors);"
_AGAIN = "    x = Vectors::load(args.x + u64(row) * args.stride, args.vectors);\n  }"
_SUM = "Vectors::block_sum(mine, sums[turn])"
_SCALE = f"rsqrtf(fmaf({_SUM}, args.inverse, args.epsilon))"
_LOW, _HIGH = "T::low(x) * scale * T::low(weight)", "T::high(x) * scale * T::high(weight)"
_LARGEST = "3.3895314e38f"  # of bf16
_PRODUCT = f"{_LOW}, {_HIGH}"

MUTATIONS = catalogue(VARIANTS, {
    "norm-rms": (
        ("the weight is multiplied first",
         "T::round_pair(T::low(x) * scale * T::low(weight), T::high(x) * scale * T::high(weight))",
         "T::round_pair(T::low(x) * T::low(weight) * scale, T::high(x) * T::high(weight) * scale)"),
        ("the wait is gone", _WAIT, ""),
        ("x is read before the wait", _WAIT, "  if (args.x[0].x == 7u) return;\n" + _WAIT),
        ("some blocks do not wait", _WAIT, "  if (blockIdx.x == 0u) wait_for_previous();\n"),
        ("y is written before the wait", _WAIT, "  if (threadIdx.x == 0u) args.y[blockIdx.x * args.vectors] = Vec4{};\n"
         + _WAIT),
        ("sums are read before all are there", "    __syncthreads();\n", "    __syncwarp();\n"),
        ("sums of two rows share their place", "u32 turn = 0u;; turn ^= 1u", "u32 turn = 0u;; turn ^= 0u"),
        ("every lane writes a sum", "if (threadIdx.x % 32 == 0) sums[", "sums["),
        ("the last four warps are left out", "i < kWarps / 4; ++i) plus", "i < kWarps / 4 - 1; ++i) plus"),
        ("a warp's sum is that of its halves", "int step = 16; step > 0; step /= 2",
         "int step = 8; step > 0; step /= 2"),
        ("a vector past the end of a row is read", "load_or_zero(row + at, at < vectors)",
         "load_or_zero(row + at, at <= vectors)"),
        ("the last vector of a row is not read", "load_or_zero(row + at, at < vectors)",
         "load_or_zero(row + at, at + 1u < vectors)"),
        ("a vector past the end of a row is written", "if (at < vectors) row[at] = out;",
         "if (at <= vectors) row[at] = out;"),
        ("the last vector of a row is not written", "if (at < vectors) row[at] = out;",
         "if (at + 1u < vectors) row[at] = out;"),
        ("the next row is the neighbour's", "const u32 next = row + gridDim.x;", "const u32 next = row + 1u;"),
        ("a row more than there are", "const bool more = next < args.rows;", "const bool more = next <= args.rows;"),
        ("the last row is left out", "const bool more = next < args.rows;", "const bool more = next + 1u < args.rows;"),
        ("the next row takes the place of this one", "    const Vectors now = x;\n    " + _NEXT + "\n",
         "    " + _NEXT + "\n    const Vectors now = x;\n"),
        ("rows of x follow one another", _FIRST, _FIRST.replace("args.stride", "args.vectors")),
        ("next rows of x follow one another", _NEXT, _NEXT.replace("args.stride", "args.vectors")),
        ("x starts at 32 bits", _FIRST, _FIRST.replace("u64(row) * args.stride", "row * u32(args.stride)")),
        ("the next row of x starts at 32 bits", _NEXT,
         _NEXT.replace("u64(next) * args.stride", "next * u32(args.stride)")),
        ("y starts at 32 bits", "args.y + u64(row) * args.vectors", "args.y + row * args.vectors"),
        ("epsilon is a constant", "args.inverse, args.epsilon)", "args.inverse, 1e-5f)"),
        ("epsilon is left out", "args.inverse, args.epsilon)", "args.inverse, 1e-30f)"),
        ("epsilon is added to the root", _SCALE,
         f"(1.f / (sqrtf({_SUM} * args.inverse) + args.epsilon))"),
        ("squares are added up, their mean is not taken", "args.inverse, args.epsilon)", "1.f / 64, args.epsilon)"),
        ("the mean is of a whole block's values", "args.inverse, args.epsilon)",
         "1.f / (384 * 8), args.epsilon)"),
        ("a NaN counts as zero", "even = fmaf(T::low(values[j]), T::low(values[j]), even);",
         "even = fmaxf(fmaf(T::low(values[j]), T::low(values[j]), even), 0.f);"),
        ("odd values are left out", "return even + odd;", "return even + even;"),
        ("the weight has no sign", _PRODUCT,
         "T::low(x) * scale * fabsf(T::low(weight)), T::high(x) * scale * fabsf(T::high(weight))"),
        ("the weight is one more", _PRODUCT,
         "T::low(x) * scale * (1.f + T::low(weight)), T::high(x) * scale * (1.f + T::high(weight))"),
        ("rounded before the weight", _PRODUCT,
         "T::widen(T::round(T::low(x) * scale)) * T::low(weight), "
         "T::widen(T::round(T::high(x) * scale)) * T::high(weight)"),
        ("values end at the largest that fp16 holds", _PRODUCT,
         "fminf(T::low(x), 65504.f) * scale * T::low(weight), fminf(T::high(x), 65504.f) * scale * T::high(weight)"),
        ("zeros have no sign", _PRODUCT,
         "T::low(x) * scale * T::low(weight) + 0.f, T::high(x) * scale * T::high(weight) + 0.f"),
        ("results end at the largest", _PRODUCT,
         f"{_LOW} > {_LARGEST} ? {_LARGEST} : {_LOW}, {_HIGH} > {_LARGEST} ? {_LARGEST} : {_HIGH}"),
        ("results end at the least", _PRODUCT,
         f"{_LOW} < -{_LARGEST} ? -{_LARGEST} : {_LOW}, {_HIGH} < -{_LARGEST} ? -{_LARGEST} : {_HIGH}"),
    ),
    "norm-rms-two": (
        ("the wait is gone", _WAIT, ""),
        ("a thread's second vector is its first", "const u32 at = threadIdx.x + i * kThreads;\n      out",
         "const u32 at = threadIdx.x;\n      out"),
        ("vectors of a thread lie side by side", "const u32 at = threadIdx.x + i * kThreads;\n      const Vec4 out",
         "const u32 at = threadIdx.x * kVectors + i;\n      const Vec4 out"),
        ("squares overflow in fp16", "even = fmaf(T::low(values[j]), T::low(values[j]), even);",
         "even += T::low(T::multiply(values[j], values[j]));"),
        ("the last row is left out", "const bool more = next < args.rows;", "const bool more = next + 1u < args.rows;"),
    ),
    "norm-rms-long": (
        ("the next row is this one again", _AGAIN, _AGAIN.replace("row", "blockIdx.x")),
        ("the next row of x starts at 32 bits", _AGAIN,
         _AGAIN.replace("u64(row) * args.stride", "row * u32(args.stride)")),
    ),
    "norm-concat": (
        ("the wait is gone", _WAIT, ""),
        ("results end at the largest", _PRODUCT,
         f"{_LOW} > {_LARGEST} ? {_LARGEST} : {_LOW}, {_HIGH} > {_LARGEST} ? {_LARGEST} : {_HIGH}"),
        ("results end at the least", _PRODUCT,
         f"{_LOW} < -{_LARGEST} ? -{_LARGEST} : {_LOW}, {_HIGH} < -{_LARGEST} ? -{_LARGEST} : {_HIGH}"),
        ("ids are read before the wait", _WAIT, "  if (load_id(args.ids, row, false) == 7) return;\n" + _WAIT),
        ("y is written before the wait", _WAIT,
         "  if (threadIdx.x == 0u) args.y[blockIdx.x * args.vectors] = Vec4{};\n" + _WAIT),
        ("sums are read before all are there", "    __syncthreads();\n", "    __syncwarp();\n"),
        ("an id below zero is looked up", "id >= 0 && id < args.rows_of_table", "id < args.rows_of_table"),
        ("an id past the table is looked up", "id < args.rows_of_table", "id <= args.rows_of_table"),
        ("the table's last row is not there", "id < args.rows_of_table", "id + 1 < args.rows_of_table"),
        ("ids are of 32 bits", "load_id(args.ids, row, args.wide != 0u)", "load_id(args.ids, row, false)"),
        ("ids are looked at as 32 bits", "const long long id =", "const int id = (int)"),
        ("who has no row has the first", "there ? args.vectors : 0u", "args.vectors"),
        ("the table's row starts at 32 bits", "u64(there ? id : 0) * args.vectors",
         "u32(there ? id : 0) * args.vectors"),
        ("rows of x follow one another", "args.x + row * args.stride", "args.x + row * args.vectors"),
        ("x starts at 32 bits", "args.x + row * args.stride", "args.x + u32(row * args.stride)"),
        ("the halves change places", "args.y + u64(blockIdx.x) * args.vectors",
         "args.y + u64(blockIdx.x ^ 1u) * args.vectors"),
        ("y starts at 32 bits", "args.y + u64(blockIdx.x) * args.vectors", "args.y + blockIdx.x * args.vectors"),
        ("weights change places", "second ? args.weight : args.table_weight",
         "second ? args.table_weight : args.weight"),
        ("the first half is kept, too", "if (second && args.normed != nullptr)", "if (args.normed != nullptr)"),
        ("nothing is kept", "if (second && args.normed != nullptr)", "if (second && args.normed == nullptr)"),
        ("what is kept starts at 32 bits", "args.normed + row * args.vectors", "args.normed + u32(row) * args.vectors"),
        ("epsilon is left out", "args.inverse, args.epsilon)", "args.inverse, 1e-30f)"),
        ("no epsilon is a small one", "args.inverse, args.epsilon)", "args.inverse, fmaxf(args.epsilon, 1e-12f))"),
        ("the sum of huge squares is finite", "return even + odd;", "return fminf(even + odd, 3.4e38f);"),
        ("a NaN counts as zero", "even = fmaf(T::low(values[j]), T::low(values[j]), even);",
         "even = fmaxf(fmaf(T::low(values[j]), T::low(values[j]), even), 0.f);"),
        ("scales end below infinity", "const float scale = there ? root : 0.f;",
         "const float scale = there ? fminf(root, 1e18f) : 0.f;"),
        ("of what is not there the scale is infinite", "const float scale = there ? root : 0.f;",
         "const float scale = root;"),
    ),
})  # fmt: skip

ESCAPES: tuple[tuple[str, str], ...] = ()
