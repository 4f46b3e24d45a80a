"""Small kernels around one kind of instruction each, and inputs for them.

A kernel takes three arrays of 64-bit words and an array for results: thread i reads word i of each, and writes result k
to word k * threads + i. Results are compared as `Snippet.results` says: "bits", or the name of a float format, where a
NaN is as good as another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ENTRY = "snippet"


@dataclass(frozen=True)
class Snippet:
    """One kernel.

    Attributes:
        inputs: what the words hold: "int", "small", or a float format.
        results: what each result word is called and how it is compared.
        cluster: blocks of a cluster; the kernel itself says so.
        tolerance: largest difference of floats; 0 where each is rounded once.
    """

    name: str
    source: str
    inputs: str
    results: tuple[tuple[str, str], ...]
    threads: int = 256
    blocks: int = 4
    cluster: int = 1
    tolerance: float = 0.0


_KERNEL = """
typedef unsigned long long u64;
typedef unsigned u32;
#define PUT(k, v) out[(k) * {count}u + i] = (u64)(v)
__device__ __forceinline__ u32 address(const void* p) {{ return (u32)__cvta_generic_to_shared(p); }}
{before}
extern "C" __global__ void {cluster} __launch_bounds__({threads}) snippet(
    const u64* __restrict__ xs, const u64* __restrict__ ys, const u64* __restrict__ zs, u64* out) {{
  const u32 i = blockIdx.x * {threads}u + threadIdx.x, lane = threadIdx.x % 32u;
  const u64 x = xs[i], y = ys[i], z = zs[i];
  {body}
}}
"""

_ASM = """{{ u64 r;
  asm volatile("{{ .reg .pred p, q; .reg .b16 ah, bh, ch, dh; .reg .b32 a, b, c, d, e; .reg .b64 al, bl, cl, dl; "
    "cvt.u16.u64 ah, %1; cvt.u16.u64 bh, %2; cvt.u16.u64 ch, %3; cvt.u32.u64 a, %1; cvt.u32.u64 b, %2; "
    "cvt.u32.u64 c, %3; mov.b64 al, %1; mov.b64 bl, %2; mov.b64 cl, %3; "
    "{text}; {result} }}" : "=l"(r) : "l"(x), "l"(y), "l"(z) : "memory");
  PUT({k}, r); }}
"""

_RESULT = {"d": "cvt.u64.u32 %0, d;", "dh": "cvt.u64.u16 %0, dh;", "dl": "mov.b64 %0, dl;"}
_SIGNS = ("s32", "u32", "s64", "u64", "s16", "u16")
_LETTER = {"32": "", "64": "l", "16": "h"}


def custom(
    name: str, inputs: str, results: Iterable[str | tuple[str, str]], body: str, before: str = "", **more: Any
) -> Snippet:
    """A kernel whose body has x, y, z, i and lane, and gives results with PUT(k, value); `before` stands before it."""
    threads, blocks, cluster = more.get("threads", 256), more.get("blocks", 4), more.get("cluster", 1)
    clusters = f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else ""
    source = _KERNEL.format(count=threads * blocks, threads=threads, body=body, before=before, cluster=clusters)
    listed = tuple((item, "bits") if isinstance(item, str) else item for item in results)
    return Snippet(name, source, inputs, listed, **more)


def _asm(name: str, inputs: str, compare: str, *texts: str, result: str = "") -> Snippet:
    """A kernel of instructions that take a, b, c (ah … of 16 bits, al … of 64) and give d (dh, dl)."""
    parts = []
    for k, text in enumerate(texts):
        words = text.replace(",", " ").replace(";", " ").replace("|", " ").split()
        register = result or next(item for item in ("dl", "dh", "d") if item in words)
        parts.append(_ASM.format(text=text, result=_RESULT[register], k=k))
    return custom(name, inputs, [(text, compare) for text in texts], "".join(parts))


def _form(name: str, sources: str, kinds: Iterable[str]) -> list[str]:
    """`name`.kind with registers of the kind's width."""
    out = []
    for kind in kinds:
        letter = _LETTER[kind[1:]]
        out.append(f"{name}.{kind} d{letter}, " + ", ".join(s + letter for s in sources))
    return out


def _integers() -> list[Snippet]:
    bits = ("b32", "b64", "b16")
    signed, wide, narrow = ("s32", "s64", "s16"), ("s32", "u32"), ("s16", "u16")
    long = ("b32", "b64")
    compare = [
        f"set.{how}.u32.{kind} d, {r}a{w}, {r}b{w}".replace(" r", " ")
        for r in ("",) for kind, w in (("s32", ""), ("u32", ""), ("s64", "l"), ("u64", "l"), ("s16", "h"))
        for how in ("eq", "ne", "lt", "le", "gt", "ge")
    ]  # fmt: skip
    setp = [
        f"setp.ne.u32 q, c, 0; setp.{how}.{op}.{kind} p|q, a, b, q; selp.u32 d, 1, 0, p; selp.u32 e, 2, 0, q; "
        "or.b32 d, d, e"
        for op in ("and", "or", "xor") for how, kind in (("lt", "s32"), ("hi", "u32"), ("ls", "u32"), ("eq", "b32"))
    ]  # fmt: skip
    carry = [
        "add.cc.u32 d, a, b; addc.u32 d, c, 0",
        "sub.cc.u32 d, a, b; subc.u32 d, c, 0",
        "sub.cc.s32 d, a, b; subc.cc.s32 d, d, c; subc.s32 d, a, c",
        "add.cc.u64 dl, al, bl; addc.u64 dl, cl, al",
        "sub.cc.s64 dl, al, bl; subc.s64 dl, cl, al",
        "mad.lo.cc.u32 d, a, b, c; madc.hi.u32 d, a, b, c",
        "mad.lo.cc.s32 d, a, b, c; madc.hi.cc.s32 d, a, b, c; addc.s32 d, d, a",
        "mad.hi.cc.u32 d, a, b, c; addc.u32 d, a, c",
        "mad.lo.cc.u64 dl, al, bl, cl; madc.hi.u64 dl, al, bl, cl",
    ]
    flagged = [
        f"setp.lt.u32 q, a, c; lop3.{how}.b32 d|p, a, b, c, {table:#x}, q; selp.u32 e, 1, 0, p; xor.b32 d, d, e"
        for how in ("or", "and") for table in (0x80, 0x96, 0x01)
    ]  # fmt: skip
    jump = (
        "rem.u32 d, a, 3; ways: .branchtargets one, two, three; brx.idx d, ways; one: mov.u32 d, b; bra out; "
        "two: mov.u32 d, c; bra out; three: mov.u32 d, a; out: xor.b32 d, d, c"
    )
    return [
        _asm("add", "int", "bits", *_form("add", "ab", _SIGNS)),
        _asm("add_saturated", "int", "bits", "add.sat.s32 d, a, b", "sub.sat.s32 d, a, b"),
        _asm("carry", "int", "bits", *carry),
        _asm("lop3_flagged", "int", "bits", *flagged),
        _asm("jump_table", "int", "bits", jump),
        _asm("sub", "int", "bits", *_form("sub", "ab", _SIGNS)),
        _asm("mul_lo", "int", "bits", *_form("mul.lo", "ab", _SIGNS)),
        _asm("mul_hi", "int", "bits", *_form("mul.hi", "ab", _SIGNS)),
        _asm("mul_wide", "int", "bits", *(f"mul.wide.{k} dl, a, b" for k in wide),
             *(f"mul.wide.{k} d, ah, bh" for k in narrow)),
        _asm("mad", "int", "bits", *_form("mad.lo", "abc", _SIGNS), *_form("mad.hi", "abc", ("s32", "u32", "u64")),
             *(f"mad.wide.{k} dl, a, b, cl" for k in wide), *(f"mad.wide.{k} d, ah, bh, c" for k in narrow)),
        _asm("mul24", "int", "bits", *_form("mul24.lo", "ab", wide), *_form("mul24.hi", "ab", wide)),
        _asm("div", "int", "bits", *(f"or.b32 b, b, 1; div.{k} d, a, b" for k in wide),
             *(f"or.b32 b, b, 1; rem.{k} d, a, b" for k in wide)),
        _asm("sad", "int", "bits", *_form("sad", "abc", _SIGNS)),
        _asm("min", "int", "bits", *_form("min", "ab", _SIGNS)),
        _asm("max", "int", "bits", *_form("max", "ab", _SIGNS)),
        _asm("abs", "int", "bits", *_form("abs", "a", signed)),
        _asm("neg", "int", "bits", *_form("neg", "a", signed)),
        _asm("popc", "int", "bits", "popc.b32 d, a", "popc.b64 d, al"),
        _asm("clz", "int", "bits", "clz.b32 d, a", "clz.b64 d, al"),
        _asm("bfind", "int", "bits", *(f"bfind{s}.{k} d, a{w}" for s in ("", ".shiftamt")
             for k, w in (("u32", ""), ("s32", ""), ("u64", "l"), ("s64", "l")))),
        _asm("brev", "int", "bits", *_form("brev", "a", long)),
        _asm("bfe", "small", "bits", *(f"bfe.{k} d{w}, a{w}, b, c" for k, w in
             (("u32", ""), ("s32", ""), ("u64", "l"), ("s64", "l")))),
        _asm("bfi", "small", "bits", "bfi.b32 d, a, c, b, c", "shr.u32 e, c, 5; bfi.b32 d, a, c, b, e",
             "shr.u32 e, c, 5; bfi.b64 dl, al, cl, b, e"),
        _asm("shl", "small", "bits", "shl.b32 d, a, b", "shl.b64 dl, al, b", "shl.b16 dh, ah, b"),
        _asm("shr", "small", "bits", *(f"shr.{k} d{w}, a{w}, b" for k, w in (("u32", ""), ("s32", ""), ("u64", "l"),
             ("s64", "l"), ("u16", "h"), ("s16", "h")))),
        _asm("shf", "small", "bits", *(f"shf.{d}.{m}.b32 d, a, c, b" for d in "lr" for m in ("wrap", "clamp"))),
        _asm("lop3", "int", "bits", *(f"lop3.b32 d, a, b, c, {t}" for t in (0, 1, 0x80, 0x96, 0xE8, 0xCA, 0x6A, 0xFE))),
        _asm("logic", "int", "bits", *(f for n in ("and", "or", "xor") for f in _form(n, "ab", bits)),
             *_form("not", "a", bits), *_form("cnot", "a", bits)),
        _asm("prmt", "int", "bits", *(f"prmt.b32{m} d, a, b, c" for m in
             ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"))),
        _asm("dp4a", "int", "bits", *(f"dp4a.{p}.{q} d, a, b, c" for p in wide for q in wide)),
        _asm("dp2a", "int", "bits", *(f"dp2a.{h}.{p}.{q} d, a, b, c" for h in ("lo", "hi") for p in wide
             for q in wide)),
        _asm("set", "int", "bits", *compare),
        _asm("setp", "int", "bits", *setp),
        _asm("selp", "int", "bits", "setp.lt.s32 p, c, 0; selp.b32 d, a, b, p",
             "setp.lt.s32 p, c, 0; selp.b64 dl, al, bl, p", "setp.lt.s32 p, c, 0; selp.b16 dh, ah, bh, p"),
        _asm("slct", "f32", "bits", "slct.b32.s32 d, a, b, c", "slct.b64.s32 dl, al, bl, c",
             "slct.b32.f32 d, a, b, c", "slct.ftz.b32.f32 d, a, b, c"),
        _asm("int_conversions", "int", "bits", *(f"cvt.{k}.{s} d, a" for k in ("s8", "u8", "s16", "u16")
             for s in ("s32", "u32")), *(f"cvt.sat.{k}.{s} d, a" for k in ("s8", "u8", "s16", "u16")
             for s in ("s32", "u32")), "cvt.s64.s32 dl, a", "cvt.sat.u32.s32 d, a", "cvt.sat.s32.u64 d, al"),
    ]  # fmt: skip


_ROUNDINGS = ("rn", "rz", "rm", "rp")


def _floats() -> list[Snippet]:
    out = []
    for name, sources in (("add", "a, b"), ("sub", "a, b"), ("mul", "a, b"), ("fma", "a, b, c")):
        forms = [f"{name}.{r}{m}.f32 d, {sources}" for r in _ROUNDINGS for m in ("", ".ftz", ".sat", ".ftz.sat")]
        out.append(_asm(f"{name}_f32", "f32", "f32", *forms))
    for name, sources in (("div", "a, b"), ("sqrt", "a"), ("rcp", "a")):
        forms = [f"{name}.{r}{m}.f32 d, {sources}" for r in _ROUNDINGS for m in ("", ".ftz")]
        out.append(_asm(f"{name}_f32", "f32", "f32", *forms))
    minmax = [f"{n}{m}.f32 d, a, b" for n in ("min", "max")
              for m in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs")]  # fmt: skip
    compare = [f"set.{h}{m}.u32.f32 d, a, b" for m in ("", ".ftz") for h in
               ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num",
                "nan")]  # fmt: skip
    tests = [f"testp.{t}.f32 p, a; selp.u32 d, 1, 0, p" for t in
             ("finite", "infinite", "number", "notanumber", "normal", "subnormal")]  # fmt: skip
    out += [
        _asm("minmax_f32", "f32", "f32", *minmax),
        _asm("sign_f32", "f32", "f32", "abs.f32 d, a", "abs.ftz.f32 d, a", "neg.f32 d, a", "neg.ftz.f32 d, a",
             "copysign.f32 d, a, b"),
        _asm("compare_f32", "f32", "bits", *compare, *tests),
        _asm("f64", "f64", "f64", "fma.rn.f64 dl, al, bl, cl", "add.rn.f64 dl, al, bl", "mul.rn.f64 dl, al, bl",
             "min.f64 dl, al, bl", "max.f64 dl, al, bl", "div.rn.f64 dl, al, bl", "sqrt.rn.f64 dl, al"),
        *(_asm(f"{name}_f64", "f64", "f64", *(f"{name}.{r}.f64 dl, {sources}" for r in _ROUNDINGS))
          for name, sources in (("add", "al, bl"), ("sub", "al, bl"), ("mul", "al, bl"), ("div", "al, bl"),
                                ("fma", "al, bl, cl"), ("sqrt", "al"), ("rcp", "al"))),
        *(_asm(f"set_{kind}", kind, "bits", *(f"set.{h}.{to}.{kind}x2 d, a, b" for h in ("lt", "eq", "neu", "num")
               for to in (f"{kind}x2", "u32")), *(f"set.{h}.{to}.{kind} d{w}, ah, bh" for h in ("ge", "ltu", "nan")
               for to, w in ((kind, "h"), ("u32", ""))),
               f"setp.lt.u32 p, a, b; set.gt.xor.{kind}x2.{kind}x2 d, b, c, p")
          for kind in ("f16", "bf16")),
    ]  # fmt: skip
    for kind, r, s in (("f16", "dh", "h"), ("f16x2", "d", ""), ("bf16", "dh", "h"), ("bf16x2", "d", "")):
        two, three = f"{r}, a{s}, b{s}", f"{r}, a{s}, b{s}, c{s}"
        half = kind.startswith("f16")
        plain = [f"{n}.rn{m}.{kind} {two}" for n in ("add", "sub", "mul")
                 for m in (("", ".ftz", ".sat", ".ftz.sat") if half else ("",))]  # fmt: skip
        fused = [f"fma.rn{m}.{kind} {three}" for m in
                 (("", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu") if half else ("", ".relu"))]  # fmt: skip
        ends = [f"{n}{m}.{kind} {two}" for n in ("min", "max") for m in
                ("", ".NaN", ".xorsign.abs") + ((".ftz",) if half else ())]  # fmt: skip
        signs = [f"neg.{kind} {r}, a{s}", f"abs.{kind} {r}, a{s}"]
        out.append(_asm(f"arithmetic_{kind}", kind[:-2] if kind.endswith("x2") else kind, kind, *plain, *fused))
        out.append(_asm(f"minmax_{kind}", kind[:-2] if kind.endswith("x2") else kind, kind, *ends, *signs))
    return out


def _conversions() -> list[Snippet]:
    whole = ("rni", "rzi", "rmi", "rpi")
    to_int = [f"cvt.{r}{m}.{k} {d}, a" for r in whole for m in ("", ".ftz")
              for k, d in (("s32.f32", "d"), ("u32.f32", "d"), ("s64.f32", "dl"), ("u64.f32", "dl"), ("s16.f32", "dh"),
                           ("u16.f32", "dh"), ("s8.f32", "d"), ("u8.f32", "d"))]  # fmt: skip
    half_int = [
        f"cvt.{r}.{k} {d}, ah" for r in whole for k, d in (("s32.f16", "d"), ("u32.f16", "d"), ("s16.f16", "dh"))
    ]
    double_int = [
        f"cvt.{r}.{k} {d}, al" for r in whole for k, d in (("s32.f64", "d"), ("u64.f64", "dl"), ("s64.f64", "dl"))
    ]
    from_int = [f"cvt.{r}.f32.{k} d, {s}" for r in _ROUNDINGS
                for k, s in (("s32", "a"), ("u32", "a"), ("s64", "al"), ("u64", "al"))]  # fmt: skip
    pairs = [f"cvt.{r}{m}.{k}.f32 d, a, b" for k in ("f16x2", "bf16x2") for r in ("rn", "rz") for m in ("", ".relu")]
    return [
        _asm("float_to_int", "f32", "bits", *to_int),
        _asm("half_to_int", "f16", "bits", *half_int),
        _asm("double_to_int", "f64", "bits", *double_int),
        _asm("int_to_float", "int", "f32", *from_int),
        _asm("int_to_double", "int", "f64", "cvt.rn.f64.s32 dl, a", "cvt.rn.f64.u32 dl, a", "cvt.rn.f64.s64 dl, al",
             "cvt.rz.f64.u64 dl, al"),
        _asm("int_to_half", "int", "f16", "cvt.rn.f16.s32 dh, a", "cvt.rn.f16.u16 dh, ah", "cvt.rz.f16.s16 dh, ah"),
        _asm("float_to_whole", "f32", "f32", *(f"cvt.{r}{m}.f32.f32 d, a" for r in whole
             for m in ("", ".ftz", ".sat"))),
        _asm("float_to_half", "f32", "f16", *(f"cvt.{r}.f16.f32 dh, a" for r in _ROUNDINGS), "cvt.rn.ftz.f16.f32 dh, a",
             "cvt.rn.sat.f16.f32 dh, a", "cvt.rn.relu.f16.f32 dh, a"),
        _asm("float_to_bf16", "f32", "bf16", "cvt.rn.bf16.f32 dh, a", "cvt.rz.bf16.f32 dh, a",
             "cvt.rn.relu.bf16.f32 dh, a"),
        _asm("float_to_f16x2", "f32", "f16x2", *(p for p in pairs if ".f16x2" in p)),
        _asm("float_to_bf16x2", "f32", "bf16x2", *(p for p in pairs if ".bf16x2" in p)),
        _asm("half_to_float", "f16", "f32", "cvt.f32.f16 d, ah", "cvt.sat.f32.f16 d, ah", "cvt.ftz.f32.f16 d, ah"),
        _asm("bf16_to_float", "bf16", "f32", "cvt.f32.bf16 d, ah"),
        _asm("double_to_float", "f64", "f32", *(f"cvt.{r}.f32.f64 d, al" for r in _ROUNDINGS)),
        _asm("float_to_double", "f32", "f64", "cvt.f64.f32 dl, a", "cvt.ftz.f64.f32 dl, a"),
        # The lower 13 bits of a tf32 word mean nothing.
        _asm("float_to_tf32", "f32", "f32", *(f"cvt.{r}.tf32.f32 d, a; and.b32 d, d, 0xffffe000" for r in
             ("rna", "rn", "rz", "rn.relu", "rz.relu"))),
        _asm("float_to_fp8", "f32", "bits", *(f"cvt.rn.satfinite{m}.{k}.f32 dh, a, b" for k in ("e4m3x2", "e5m2x2")
             for m in ("", ".relu"))),
        _asm("half_to_fp8", "f16", "bits", *(f"cvt.rn.satfinite{m}.{k}.f16x2 dh, a" for k in ("e4m3x2", "e5m2x2")
             for m in ("", ".relu"))),
        _asm("fp8_to_half", "int", "f16x2", *(f"cvt.rn{m}.f16x2.{k} d, ah" for k in ("e4m3x2", "e5m2x2")
             for m in ("", ".relu"))),
    ]  # fmt: skip


SNIPPETS = {item.name: item for make in (_integers, _floats, _conversions) for item in make()}

_FLOATS: dict[str, Any] = {
    "f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def _specials(kind: str) -> Array:
    """Words with zeros, subnormals, infinities, NaN, the ends of the range, and their neighbours."""
    if kind in ("int", "small"):
        edges = [0, 1, 2, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 32) - 1]
        edges += [1 << 32, 1 << 63, (1 << 63) - 1, (1 << 64) - 1, 0x80000000_80000000, 0x7FFFFFFF_7FFFFFFF]
        return np.array(edges, np.uint64)
    info, dtype = ml_dtypes.finfo(_FLOATS[kind]), _FLOATS[kind]
    tiny, least, most = float(info.tiny), float(info.smallest_subnormal), float(info.max)
    values = [0, least, 3 * least, tiny - least, tiny, most, np.inf, np.nan, 1, 0.5, 1.5, 2.5, 3, 127.5, 128, 448, 464]
    values += [480, 32767.5, 65504, 65520, 2.0**31, 2.0**32, 2.0**63, 1 + float(info.eps), 1 - float(info.eps) / 2]
    with np.errstate(over="ignore"):
        positive = np.array(values).astype(dtype)
    signed = np.concatenate([positive, -positive])
    word = np.dtype(f"u{signed.itemsize}")
    codes: Array = np.concatenate([signed.view(word), np.array([np.iinfo(word).max], word)])
    return codes.astype(np.uint64)


def inputs(kind: str, count: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Three arrays of `count` 64-bit words: special values, bits at random and, for floats, values of like size."""
    head, _, name = kind.rpartition(" ")
    out = []
    for position in range(3):
        noise = rng.integers(0, 1 << 64, count, np.uint64)
        if kind == "int":
            words = np.where(rng.random(count) < 0.5, rng.choice(_specials(kind), count), noise)
        elif kind == "small":
            limited = noise & np.uint64(0x3FF if position == 2 else 0x7F)
            mixed = np.where(rng.random(count) < 0.3, rng.choice(_specials(kind), count), limited)
            words = noise if position == 0 else mixed
        else:
            size = np.dtype(_FLOATS[name]).itemsize
            lanes = count * 8 // size
            near = rng.uniform(-2, 2, lanes) if head else rng.normal(0, 1, lanes) * 2.0 ** rng.integers(-3, 10, lanes)
            codes = near.astype(_FLOATS[name]).view(f"u{size}").astype(np.uint64)
            if not head:
                bits = rng.integers(0, 1 << 64, lanes, np.uint64)
                draw = rng.random(lanes)
                codes = np.where(draw < 0.5, rng.choice(_specials(name), lanes), np.where(draw < 0.75, bits, codes))
            words = codes.astype(f"u{size}").view(np.uint64)
        out.append(np.ascontiguousarray(words))
    return out[0], out[1], out[2]
