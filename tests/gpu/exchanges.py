"""Small kernels of what threads do together or with memory: exchanges in a warp, atomics, matrices, copies."""

from __future__ import annotations

from gpu.snippets import Snippet, custom


def _warp() -> list[Snippet]:
    shuffles, results = [], []
    for k, mode in enumerate(("idx", "up", "down", "bfly")):
        shuffles.append(
            f'{{ u32 r, f; asm volatile("{{ .reg .pred p; shfl.sync.{mode}.b32 %0|p, %2, %3, %4, 0xffffffff; '
            'selp.u32 %1, 1, 0, p; }" : "=r"(r), "=r"(f) : "r"((u32)x), "r"((u32)y), "r"((u32)z)); '
            f"PUT({2 * k}, r); PUT({2 * k + 1}, f); }}"
        )
        results += [f"shfl.sync.{mode}.b32", f"shfl.sync.{mode}.b32, predicate"]
    # Values of two bits, so that some lanes agree, and all in the first warps of two in three.
    body = """
    const u32 few = (u32)y & ((blockIdx.x % 3u) ? 0u : 3u), flag = (u32)(x >> 7) & 1u, member = MEMBERS;
    #define VOTE(k, MODE, f) { u32 r; asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync." MODE \
        ".pred q, p, %2; selp.u32 %0, 1, 0, q; }" : "=r"(r) : "r"((u32)(f)), "r"(member)); PUT(k, r); }
    #define REDUX(k, OP) { u32 r; asm volatile("redux.sync." OP " %0, %1, %2;" : "=r"(r) : "r"((u32)x), "r"(member)); \
        PUT(k, r); }
    VOTE(0, "all", flag) VOTE(1, "any", flag) VOTE(2, "uni", flag) VOTE(3, "all", few == 0u) VOTE(4, "uni", few == 4u)
    { u32 r; asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2; }"
        : "=r"(r) : "r"(flag), "r"(member)); PUT(5, r); }
    REDUX(6, "add.u32") REDUX(7, "min.u32") REDUX(8, "max.u32") REDUX(9, "add.s32") REDUX(10, "min.s32")
    REDUX(11, "max.s32") REDUX(12, "and.b32") REDUX(13, "or.b32") REDUX(14, "xor.b32")
    { u32 r; asm volatile("match.any.sync.b32 %0, %1, %2;" : "=r"(r) : "r"(few), "r"(member)); PUT(15, r); }
    { u32 r; asm volatile("match.any.sync.b64 %0, %1, %2;" : "=r"(r) : "l"((u64)few << 40), "r"(member));
        PUT(16, r); }
    { u32 r, f; asm volatile("{ .reg .pred p; match.all.sync.b32 %0|p, %2, %3; selp.u32 %1, 1, 0, p; }"
        : "=r"(r), "=r"(f) : "r"(few), "r"(member)); PUT(17, r); PUT(18, f); }
    """
    names = [
        "vote.all", "vote.any", "vote.uni", "vote.all of equals", "vote.uni of zeros", "vote.ballot", "redux.add.u32",
        "redux.min.u32", "redux.max.u32", "redux.add.s32", "redux.min.s32", "redux.max.s32", "redux.and", "redux.or",
        "redux.xor", "match.any.b32", "match.any.b64", "match.all.b32", "match.all.b32, predicate",
    ]  # fmt: skip
    divergent = f"""
    u32 active = 0u;
    if (z & 1u) {{ asm volatile("activemask.b32 %0;" : "=r"(active)); }}
    const u32 odd = __ballot_sync(0xffffffffu, (u32)z & 1u);
    if (z & 1u) {{ {body.replace("MEMBERS", "odd")} }}
    else {{ {"".join(f"PUT({k}, {k}u);" for k in range(len(names)))} }}
    PUT({len(names)}, active);
    """
    return [
        custom("shfl", "int", results, "".join(shuffles)),
        custom("warp", "int", names, body.replace("MEMBERS", "0xffffffffu")),
        custom("warp_divergent", "int", [*names, "activemask"], divergent),
    ]


def _atomics() -> list[Snippet]:
    out = []
    operations = (
        *(("add", k) for k in ("u32", "s32", "u64")),
        *((n, k) for n in ("min", "max") for k in ("u32", "s32", "u64", "s64")),
        *((n, k) for n in ("and", "or", "xor", "exch", "cas") for k in ("b32", "b64")), ("inc", "u32"), ("dec", "u32"),
    )  # fmt: skip
    for space in ("global", "shared"):
        parts, results = [], []
        for k, (name, kind) in enumerate(operations):
            register, cast = ("l", "u64") if kind.endswith("64") else ("r", "u32")
            # Where the compared value is what is there, for every other thread.
            values = f'"{register}"(({cast})y)'
            more = ", %3" if name == "cas" else ""
            if name == "cas":
                values = f'"{register}"(({cast})(i % 2 ? x : y)), "{register}"(({cast})z)'
            place = f"out + {2 * k} * COUNT + i" if space == "global" else "cells + threadIdx.x"
            where = f'"l"({place})' if space == "global" else f'"r"(address({place}))'
            parts.append(
                f'{{ {cast} r; *({place}) = x; asm volatile("atom.{space}.{name}.{kind} %0, [%1], %2{more};" : '
                f'"={register}"(r) : {where}, {values} : "memory"); '
                + ("" if space == "global" else f"PUT({2 * k}, cells[threadIdx.x]);")
                + f" PUT({2 * k + 1}, r); }}"
            )
            results += [f"atom.{space}.{name}.{kind}, memory", f"atom.{space}.{name}.{kind}, result"]
        body = "__shared__ u64 cells[256];" * (space == "shared") + "".join(parts)
        out.append(custom(f"atom_{space}", "int", results, body.replace("COUNT", "1024u")))
    contended = """
    __shared__ u32 cells[6];
    if (threadIdx.x < 6u) cells[threadIdx.x] = threadIdx.x % 2u ? 0xffffffffu : 0u;
    __syncthreads();
    asm volatile("red.shared.add.u32 [%0], %1;" :: "r"(address(cells)), "r"((u32)x) : "memory");
    asm volatile("red.shared.min.u32 [%0], %1;" :: "r"(address(cells + 1)), "r"((u32)x) : "memory");
    asm volatile("red.shared.max.s32 [%0], %1;" :: "r"(address(cells + 2)), "r"((u32)x) : "memory");
    asm volatile("red.shared.and.b32 [%0], %1;" :: "r"(address(cells + 3)), "r"((u32)(x | y)) : "memory");
    asm volatile("red.shared.inc.u32 [%0], %1;" :: "r"(address(cells + 4)), "r"(100u) : "memory");
    asm volatile("red.shared.xor.b32 [%0], %1;" :: "r"(address(cells + 5)), "r"((u32)x) : "memory");
    __syncthreads();
    for (u32 k = 0; k < 6u; ++k) PUT(k, cells[k]);
    """
    out.append(
        custom("red_contended", "int", [f"red.{n}" for n in ("add", "min", "max", "and", "inc", "xor")], contended)
    )
    for name, kind, inputs, letter, cast in (
        ("add", "f32", "f32", "f", "__uint_as_float((u32)y)"), ("add", "f64", "f64", "d", "__longlong_as_double(y)"),
    ):  # fmt: skip
        for space in ("global", "shared"):
            place = "out + i" if space == "global" else "cells + threadIdx.x"
            where = f'"l"({place})' if space == "global" else f'"r"(address({place}))'
            body = (
                ("__shared__ u64 cells[256];" if space == "shared" else "")
                + f"*({place}) = {'(u32)x' if kind == 'f32' else 'x'}; "
                + f'asm volatile("red.{space}.{name}.{kind} [%0], %1;" :: {where}, "{letter}"({cast}) : "memory");'
                + (" PUT(0, cells[threadIdx.x]);" if space == "shared" else "")
            )
            out.append(custom(f"red_{space}_{name}_{kind}", inputs, [(f"red.{space}.{name}.{kind}", kind)], body))
    return out


def _matrices() -> list[Snippet]:
    fill = """
    __shared__ __align__(128) u64 tile[8][64];
    u64* mine = tile[threadIdx.x / 32u];
    mine[lane * 2u] = x; mine[lane * 2u + 1u] = y;
    __syncwarp();
    """
    names: list[str] = []
    body = fill
    for trans in ("", ".trans"):
        for count in (1, 2, 4):
            first = len(names)
            outs = ", ".join(f'"=r"(r[{j}])' for j in range(count))
            regs = ", ".join(f"%{j}" for j in range(count))
            puts = "".join(f"PUT({first + j}, r[{j}]);" for j in range(count))
            text = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            body += (
                f'{{ u32 r[4]; asm volatile("{text} {{{regs}}}, [%{count}];" : {outs} : "r"(address(mine + ((lane * 5u'
                f' + 3u) % 32u) * 2u)) : "memory"); {puts} }}'
            )
            names += [text] * count
    stores, stored = fill, []
    for trans in ("", ".trans"):
        for count in (1, 2, 4):
            words = ("(u32)x", "(u32)(y >> 32)", "(u32)z", "(u32)(z >> 32)")[:count]
            regs = ", ".join(f"%{j + 1}" for j in range(count))
            text = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            listed = ", ".join(f'"r"({w})' for w in words)
            stores += (
                f'asm volatile("{text} [%0], {{{regs}}};" :: "r"(address(mine + ((lane * 7u + 1u) % 32u) * 2u)), '
                f'{listed} : "memory"); __syncwarp(); PUT({len(stored)}, mine[lane * 2u]); '
                f"PUT({len(stored) + 1}, mine[lane * 2u + 1u]); __syncwarp();"
            )
            stored += [text, text]
    turn = 'asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"((u32)x));'
    return [
        custom("ldmatrix", "int", names, body),
        custom("stmatrix", "int", stored, stores),
        custom("movmatrix", "int", ["movmatrix"], f"u32 r; {turn} PUT(0, r);"),
    ]


def _mma(name: str, inputs: str, a: int, b: int, compare: str, tolerance: float) -> Snippet:
    """A, B and C from the words; C is small whole numbers, or halves of the same kind."""
    half = compare == "f16x2"
    registers = 2 if half else 4
    words = ("(u32)x", "(u32)(x >> 32)", "(u32)y", "(u32)(y >> 32)", "(u32)z", "(u32)(z >> 32)")
    sources = [f'"r"({w})' for w in (*words[:a], *words[4 : 4 + b])]
    if half:
        sources += ['"r"((u32)x)', '"r"((u32)y)']
    elif compare == "f32":
        sources += [f'"f"(0.25f * (float)((int)(x >> {8 * j}) & 15) - 2.f)' for j in range(4)]
    else:
        sources += [f'"r"((u32)(x >> {8 * j}))' for j in range(4)]
    letter, kind = ("f", "float") if compare == "f32" else ("r", "u32")
    spots = [f"%{j}" for j in range(registers + a + b + registers)]
    d, ra = spots[:registers], spots[registers : registers + a]
    rb, c = spots[registers + a : registers + a + b], spots[registers + a + b :]
    listed = ", ".join("{" + ", ".join(group) + "}" for group in (d, ra, rb, c))
    outs = ", ".join(f'"={letter}"(r[{j}])' for j in range(registers))
    read = "__float_as_uint" if letter == "f" else "u32"
    puts = "".join(f"PUT({j}, {read}(r[{j}]));" for j in range(registers))
    body = f'{kind} r[4]; asm volatile("{name} {listed};" : {outs} : {", ".join(sources)}); {puts}'
    return custom(name, inputs, [(f"d{j}", compare) for j in range(registers)], body, tolerance=tolerance)


def _products() -> list[Snippet]:
    head = "mma.sync.aligned"
    out = [
        _mma(f"{head}.m16n8k16.row.col.f32.f16.f16.f32", "unit f16", 4, 2, "f32", 1e-4),
        _mma(f"{head}.m16n8k16.row.col.f32.bf16.bf16.f32", "unit bf16", 4, 2, "f32", 1e-4),
        _mma(f"{head}.m16n8k16.row.col.f16.f16.f16.f16", "unit f16", 4, 2, "f16x2", 0.05),
        _mma(f"{head}.m16n8k8.row.col.f32.f16.f16.f32", "unit f16", 2, 1, "f32", 1e-4),
        _mma(f"{head}.m16n8k8.row.col.f32.bf16.bf16.f32", "unit bf16", 2, 1, "f32", 1e-4),
        _mma(f"{head}.m16n8k8.row.col.f32.tf32.tf32.f32", "unit f32", 4, 2, "f32", 1e-4),
        _mma(f"{head}.m16n8k32.row.col.s32.s8.s8.s32", "int", 4, 2, "bits", 0),
        _mma(f"{head}.m16n8k32.row.col.s32.u8.s8.s32", "int", 4, 2, "bits", 0),
        _mma(f"{head}.m16n8k32.row.col.satfinite.s32.s8.s8.s32", "int", 4, 2, "bits", 0),
        _mma(f"{head}.m16n8k32.row.col.f32.e4m3.e4m3.f32", "unit e4m3", 4, 2, "f32", 0.02),
        _mma(f"{head}.m16n8k32.row.col.f32.e5m2.e5m2.f32", "unit e5m2", 4, 2, "f32", 0.02),
    ]
    # Descriptors of tiles of 8 rows of 16 bytes, not swizzled, K-major: 128 bytes along K, 256 along M and N.
    wide = ", ".join(f"%{j}" for j in range(32))
    outs = ", ".join(f'"+f"(d[{j}])' for j in range(32))
    for held in ("shared", "registers"):
        a = "%32" if held == "shared" else "{%32, %33, %34, %35}"
        b, tail = ("%33", "0, 0") if held == "shared" else ("%36", "0")
        tail = f"p, 1, 1, {tail}"
        sources = '"l"(first)' if held == "shared" else ", ".join(
            f'"r"({w})' for w in ("(u32)x", "(u32)(x >> 32)", "(u32)y", "(u32)(y >> 32)")
        )  # fmt: skip
        body = f"""
        __shared__ __align__(128) u64 left[256], right[256];
        left[threadIdx.x] = x; left[128u + threadIdx.x] = y; right[threadIdx.x] = z;
        right[128u + threadIdx.x] = z >> 32 | z << 32;
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        const u64 form = (u64)(128u >> 4) << 16 | (u64)(256u >> 4) << 32;
        const u64 first = form | (address(left) & 0x3ffffu) >> 4, second = form | (address(right) & 0x3ffffu) >> 4;
        float d[32];
        for (int j = 0; j < 32; ++j) d[j] = 0.25f * (float)((int)(x >> j) & 15) - 2.f;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile("{{ .reg .pred p; setp.ne.u32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
            "{{{wide}}}, {a}, {b}, {tail}; }}" : {outs} : {sources}, "l"(second) : "memory");
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (first == 0u) PUT(0, 0u);
        for (int j = 0; j < 32; ++j) PUT(j, __float_as_uint(d[j]));
        """
        results = [(f"d{j}", "f32") for j in range(32)]
        out.append(custom(f"wgmma_{held}", "unit bf16", results, body, threads=128, blocks=2, tolerance=1e-4))
    return out


def _copies() -> list[Snippet]:
    parts, names = [], []
    forms = (("ca", 4, ""), ("ca", 8, ""), ("ca", 16, ""), ("cg", 16, ""), ("ca", 16, "size"), ("cg", 16, "size"))
    for k, (level, size, partial) in enumerate(forms):
        source = f"(const char*)xs + (i ^ 1u) / 2u * 16u + {0 if size == 16 else 8}u * (i % 2u)"
        more = ", %2" if partial else ""
        # The whole of a copy, or a part with zeros after it.
        given = ', "r"((u32)(y % 17u))' if partial else ""
        parts.append(
            f'mine[0] = y; mine[1] = z; asm volatile("cp.async.{level}.shared.global [%0], [%1], {size}{more};" '
            f':: "r"(address(mine)), "l"({source}){given} : "memory"); asm volatile("cp.async.commit_group; '
            f'cp.async.wait_group 0;" ::: "memory"); PUT({2 * k}, mine[0]); PUT({2 * k + 1}, mine[1]);'
        )
        names += [f"cp.async.{level} {size} {partial}, {half}" for half in ("low", "high")]
    bulk = """
    __shared__ __align__(128) u64 tile[256];
    __shared__ __align__(8) u64 barrier;
    const u32 bar = address(&barrier);
    if (threadIdx.x == 0u) {
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    for (u32 phase = 0; phase < 2u; ++phase) {
      if (threadIdx.x == 0u) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 2048;" :: "r"(bar) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];"
          :: "r"(address(tile)), "l"((phase ? ys : xs) + blockIdx.x * 256u), "r"(bar) : "memory");
      }
      asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1; @!p bra again; }"
        :: "r"(bar), "r"(phase) : "memory");
      PUT(phase, tile[(threadIdx.x * 37u + 5u) % 256u]);
      __syncthreads();
    }
    tile[threadIdx.x] = z + 1u;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0u) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 2048;"
        :: "l"(out + 2u * 1024u + blockIdx.x * 256u), "r"(address(tile)) : "memory");
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
    """
    return [
        custom("cp_async", "int", names,
                "__shared__ __align__(16) u64 tile[512]; u64* mine = tile + 2u * threadIdx.x;" + "".join(parts)),
        custom("bulk_copy", "int", ["to shared", "to shared again", "to global"], bulk),
        custom("cp_async_arrive", "int", ["own", "another's"], _INIT.format(count=256) + """
    __shared__ __align__(16) u64 tile[512];
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
      :: "r"(address(tile + 2u * threadIdx.x)), "l"(xs + (i & ~1u)) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(bar) : "memory");
    """ + _WAIT.format(phase=0) + """
    PUT(0, tile[2u * threadIdx.x]); PUT(1, tile[2u * ((threadIdx.x + 37u) % 256u) + 1u]);
    """),
    ]  # fmt: skip


_INIT = """
    __shared__ __align__(8) u64 barrier;
    const u32 bar = address(&barrier);
    if (threadIdx.x == 0u) {{
      asm volatile("mbarrier.init.shared.b64 [%0], {count};" :: "r"(bar) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }}
    __syncthreads();
"""
_WAIT = """
    asm volatile("{{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], {phase}; "
      "@!p bra again; }}" :: "r"(bar) : "memory");
"""
_CLUSTER = """
    u32 rank, size, far;
    asm volatile("mov.u32 %0, %%cluster_ctarank; mov.u32 %1, %%cluster_nctarank;" : "=r"(rank), "=r"(size));
    const u32 next = (rank + 1u) % size;
    #define CLUSTER_SYNC(arrive) asm volatile("barrier.cluster.arrive" arrive ".aligned; " \
      "barrier.cluster.wait.acquire.aligned;" ::: "memory")
    #define FAR(local, who) asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(far) : "r"(local), "r"(who))
"""


def _clusters() -> list[Snippet]:
    reads = (
        _CLUSTER
        + """
    __shared__ __align__(16) u64 tile[512];
    __shared__ u32 sums[2];
    tile[threadIdx.x] = x;
    if (threadIdx.x < 2u) sums[threadIdx.x] = 0u;
    CLUSTER_SYNC(".release");
    u64 r, s;
    FAR(address(tile + threadIdx.x), next);
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(r) : "r"(far) : "memory"); PUT(0, r);
    const u64* generic;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(tile), "r"((rank + 2u) % size));
    PUT(1, generic[(threadIdx.x * 5u + 3u) % 256u]);
    FAR(address(tile + 256u + (threadIdx.x & ~1u)), next);
    if (threadIdx.x % 2u == 0u)
      asm volatile("st.shared::cluster.v2.u64 [%0], {%1, %2};" :: "r"(far), "l"(y), "l"(z) : "memory");
    FAR(address(sums), 0u);
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" :: "r"(far), "r"((u32)x) : "memory");
    asm volatile("atom.shared::cluster.xor.b32 %0, [%1+4], %2;" : "=r"(size) : "r"(far), "r"((u32)y) : "memory");
    CLUSTER_SYNC("");
    PUT(2, tile[256u + threadIdx.x]); PUT(3, generic[0] ^ rank);
    asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];" : "=r"(rank), "=r"(size) : "r"(far) : "memory");
    PUT(4, rank); PUT(5, size);
    u32 of; asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(of) : "r"(far)); PUT(6, of);
    asm volatile("mov.u32 %0, %%clusterid.x; mov.u32 %1, %%nclusterid.x;" : "=r"(of), "=r"(size));
    PUT(7, of * 100u + size);
    CLUSTER_SYNC(".release");
    """
    )
    sends = (
        _INIT.format(count=257)
        + _CLUSTER
        + """
    __shared__ __align__(128) u64 words[256], pairs[512], source[256], copied[256], many[256];
    __shared__ u32 sum;
    source[threadIdx.x] = z;
    if (threadIdx.x == 0u) {
      sum = 7u;
      // From the other block: 24 bytes and 4 of a sum from each thread, 2 KiB; 1 KiB from each block for both.
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 11264;" :: "r"(bar) : "memory");
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    CLUSTER_SYNC(".release");
    u32 told;
    FAR(bar, next);
    told = far;
    #define REPORTS ".shared::cluster.mbarrier::complete_tx::bytes"
    FAR(address(words + threadIdx.x), next);
    asm volatile("st.async.weak" REPORTS ".b64 [%0], %1, [%2];" :: "r"(far), "l"(x), "r"(told) : "memory");
    FAR(address(pairs + 2u * threadIdx.x), next);
    asm volatile("st.async.weak" REPORTS ".v2.b64 [%0], {%1, %2}, [%3];"
      :: "r"(far), "l"(y), "l"(x), "r"(told) : "memory");
    FAR(address(&sum), next);
    asm volatile("red.async.relaxed.cluster" REPORTS ".add.u32 [%0], %1, [%2];"
      :: "r"(far), "r"((u32)y), "r"(told) : "memory");
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(told) : "memory");
    if (threadIdx.x == 0u) {
      FAR(address(copied), next);
      asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 2048, [%2];"
        :: "r"(far), "r"(address(source)), "r"(told) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], 1024, [%2], %3;" :: "r"(address(many + 128u * rank)), "l"(ys + blockIdx.x * 256u), "r"(bar),
        "h"((unsigned short)3) : "memory");
    }
    """
        + _WAIT.format(phase=0)
        + """
    PUT(0, words[threadIdx.x]); PUT(1, pairs[2u * threadIdx.x] ^ (pairs[2u * threadIdx.x + 1u] << 1)); PUT(2, sum);
    PUT(3, copied[threadIdx.x]); PUT(4, many[threadIdx.x]);
    CLUSTER_SYNC(".release");
    """
    )
    return [
        custom("cluster", "int", ["next", "generic", "stored", "kept", "added", "combined", "rank", "numbers"], reads,
               cluster=4, blocks=8),
        custom("cluster_async", "int", ["st.async", "st.async.v2", "red.async", "copied", "multicast"],
               sends, cluster=2),
    ]  # fmt: skip


SNIPPETS = {item.name: item for make in (_warp, _atomics, _matrices, _products, _copies, _clusters) for item in make()}
