"""The classic litmus tests, with what PTX says of the outcome that each is about.

`TABLE` has a row for each: the program, the outcome, and whether PTX allows it. {0}, {1}, … of a shape are what its
rows differ in. Blocks of the same block, of one cluster, or of clusters of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from litmus import Program, program

ALLOWED, FORBIDDEN = True, False


@dataclass(frozen=True)
class Row:
    """One program and whether it may end so."""

    program: Program
    outcome: tuple[tuple[str, int], ...]
    allowed: bool


def place(where: str | tuple[int, ...], threads: int) -> tuple[tuple[int, ...], int]:
    """Blocks of threads and the size of clusters: "block", "cluster", "apart", or blocks in clusters of one."""
    if isinstance(where, tuple):
        return where, 1
    if where == "block":
        return (0,) * threads, 1
    size = 2 if threads == 2 else 4
    step = 1 if where == "cluster" else size
    return tuple(range(0, threads * step, step)), size


def _shape(
    threads: Sequence[str],
    outcome: dict[str, int],
    rows: dict[str, tuple[tuple[str, ...], str | tuple[int, ...], bool]],
    final: str = "",
) -> dict[str, Row]:
    out = {}
    for name, (parts, where, allowed) in rows.items():
        blocks, cluster = place(where, len(threads))
        made = program(*(text.format(*parts) for text in threads), blocks=blocks, cluster=cluster, final=final)
        out[name] = Row(made, tuple(outcome.items()), allowed)
    return out


_GPU, _CTA = "relaxed.gpu", "relaxed.cta"
_FENCES = ("fence.acq_rel.gpu", "fence.sc.gpu")

TABLE: dict[str, Row] = {
    # Message passing: a flag was seen, but not what had been written before it.
    **_shape(("st.weak [x], 1; {0} [f], 1", "{1} r0, [f]; ld.weak r1, [x]"), {"r0": 1, "r1": 0}, {
        "MP weak": (("st.weak", "ld.weak"), "block", ALLOWED),
        "MP relaxed": (("st.relaxed.gpu", "ld.relaxed.gpu"), "apart", ALLOWED),
        "MP relaxed in a block": (("st.relaxed.gpu", "ld.relaxed.gpu"), "block", ALLOWED),
        "MP release to relaxed": (("st.release.gpu", "ld.relaxed.gpu"), "apart", ALLOWED),
        "MP relaxed to acquire": (("st.relaxed.gpu", "ld.acquire.gpu"), "apart", ALLOWED),
        "MP release to acquire": (("st.release.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "MP sys to gpu": (("st.release.sys", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "MP cta in a block": (("st.release.cta", "ld.acquire.cta"), "block", FORBIDDEN),
        "MP cta to gpu in a block": (("st.release.cta", "ld.acquire.gpu"), "block", FORBIDDEN),
        "MP cta in a cluster": (("st.release.cta", "ld.acquire.cta"), "cluster", ALLOWED),
        "MP cta apart": (("st.release.cta", "ld.acquire.cta"), "apart", ALLOWED),
        "MP cta to gpu": (("st.release.cta", "ld.acquire.gpu"), "apart", ALLOWED),
        "MP gpu to cta": (("st.release.gpu", "ld.acquire.cta"), "apart", ALLOWED),
        "MP cluster in a cluster": (("st.release.cluster", "ld.acquire.cluster"), "cluster", FORBIDDEN),
        "MP cluster to gpu in a cluster": (("st.release.cluster", "ld.acquire.gpu"), "cluster", FORBIDDEN),
        "MP cluster apart": (("st.release.cluster", "ld.acquire.cluster"), "apart", ALLOWED),
        "MP fences": (("fence.acq_rel.gpu; st.relaxed.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "MP fence without strong store": (("fence.acq_rel.gpu; st.weak", "ld.acquire.gpu"), "apart", ALLOWED),
        "MP fence of a block": (("fence.acq_rel.cta; st.relaxed.gpu", "ld.acquire.gpu"), "apart", ALLOWED),
        "MP fence, flag of a block": (("fence.acq_rel.gpu; st.relaxed.cta", "ld.acquire.gpu"), "apart", ALLOWED),
        "MP release fence": (("fence.release.gpu; st.relaxed.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "MP acquire fence releases nothing": (
            ("fence.acquire.gpu; st.relaxed.gpu", "ld.acquire.gpu"), "apart", ALLOWED),
        "MP released before at the flag": (("st.release.gpu [f], 2; st.relaxed.gpu", "ld.acquire.gpu"), "apart",
                                           FORBIDDEN),
        "MP released before elsewhere": (("st.release.gpu [g], 2; st.relaxed.gpu", "ld.acquire.gpu"), "apart",
                                         ALLOWED),
        "MP acquired before the flag was read": (("st.release.gpu", "ld.acquire.gpu r2, [f]; ld.relaxed.gpu"), "apart",
                                                 ALLOWED),
    }),
    **_shape(("st.weak [x], 1; {0}", "{1}; ld.weak r1, [x]"), {"r0": 1, "r1": 0}, {
        "MP fence to fence": (("fence.acq_rel.gpu; st.relaxed.gpu [f], 1", "ld.relaxed.gpu r0, [f]; fence.acq_rel.gpu"),
                              "apart", FORBIDDEN),
        "MP fence.sc to fence.sc": (("fence.sc.gpu; st.relaxed.gpu [f], 1", "ld.relaxed.gpu r0, [f]; fence.sc.gpu"),
                                    "apart", FORBIDDEN),
        "MP fence to fence of weak flags": (("fence.acq_rel.gpu; st.weak [f], 1", "ld.weak r0, [f]; fence.acq_rel.gpu"),
                                            "apart", ALLOWED),
        "MP release fence to acquire fence": (
            ("fence.release.gpu; st.relaxed.gpu [f], 1", "ld.relaxed.gpu r0, [f]; fence.acquire.gpu"), "apart",
            FORBIDDEN),
        "MP the wrong halves of fences": (
            ("fence.acquire.gpu; st.relaxed.gpu [f], 1", "ld.relaxed.gpu r0, [f]; fence.release.gpu"), "apart",
            ALLOWED),
        "MP release to fence": (("st.release.gpu [f], 1", "ld.relaxed.gpu r0, [f]; fence.acq_rel.gpu"), "apart",
                                FORBIDDEN),
        "MP release to fence of a block": (("st.release.gpu [f], 1", "ld.relaxed.gpu r0, [f]; fence.acq_rel.cta"),
                                           "apart", ALLOWED),
        "MP acquired later at the flag": (("st.release.gpu [f], 1", "ld.relaxed.gpu r0, [f]; ld.acquire.gpu r2, [f]"),
                                          "apart", FORBIDDEN),
        "MP acquired later elsewhere": (("st.release.gpu [f], 1", "ld.relaxed.gpu r0, [f]; ld.acquire.gpu r2, [g]"),
                                        "apart", ALLOWED),
        "MP atomics": (("atom.release.gpu.exch r2, [f], 1", "atom.acquire.gpu.add r0, [f], 0"), "apart", FORBIDDEN),
        "MP acq_rel atomics": (("atom.acq_rel.gpu.exch r2, [f], 1", "atom.acq_rel.gpu.cas r0, [f], 1, 2"), "apart",
                               FORBIDDEN),
        "MP relaxed atomics": (("atom.relaxed.gpu.exch r2, [f], 1", "atom.relaxed.gpu.add r0, [f], 0"), "apart",
                               ALLOWED),
        "MP relaxed counter": (("red.relaxed.gpu.add [f], 1", "atom.acq_rel.gpu.add r0, [f], 1"), "apart", ALLOWED),
        "MP counter that only releases": (("red.release.gpu.add [f], 1", "atom.release.gpu.add r0, [f], 1"), "apart",
                                          ALLOWED),
        "MP counter": (("red.release.gpu.add [f], 1", "atom.acq_rel.gpu.add r0, [f], 1"), "apart", FORBIDDEN),
        "MP counter behind fences": (
            ("fence.acq_rel.gpu; red.relaxed.gpu.add [f], 1", "atom.relaxed.gpu.add r0, [f], 1; fence.acq_rel.gpu"),
            "apart", FORBIDDEN),
        "MP counter of a block": (("red.release.cta.add [f], 1", "atom.acquire.gpu.add r0, [f], 1"), "apart", ALLOWED),
        "MP flag that guards": (("st.relaxed.gpu [f], 1", "ld.relaxed.gpu r0, [f]; @r0=1 ld.relaxed.gpu r2, [x]"),
                                "apart", ALLOWED),
    }),
    **_shape(("st.weak [x], 1; bar.sync", "bar.sync; ld.weak r0, [x]"), {"r0": 0}, {
        "MP barrier": ((), "block", FORBIDDEN),
        "MP barriers of other blocks": ((), "apart", ALLOWED),
    }),
    # A reduction is no acquire pattern, whatever follows it.
    **_shape(("st.weak [x], 1; st.release.gpu [f], 1", "{0} [f], 1; fence.acq_rel.gpu; ld.weak r0, [x]"),
             {"r0": 0, "f": 2}, {
        "MP red": (("red.relaxed.gpu.add",), "apart", ALLOWED),
        "MP atom for red": (("atom.relaxed.gpu.add r2,",), "apart", FORBIDDEN),
    }, final="f"),
    # Through a third thread: atomics keep what was released, other writes do not.
    **_shape(("st.weak [x], 1; st.release.gpu [f], 1", "{0}", "ld.acquire.gpu r1, [f]; ld.weak r2, [x]"),
             {"r1": 2, "r2": 0}, {
        "MP chain atom": (("atom.relaxed.gpu.add r0, [f], 1",), "apart", FORBIDDEN),
        "MP chain red": (("red.relaxed.gpu.add [f], 1",), "apart", FORBIDDEN),
        "MP chain cas": (("atom.relaxed.gpu.cas r0, [f], 1, 2",), "apart", FORBIDDEN),
        "MP chain of a block": (("atom.relaxed.cta.add r0, [f], 1",), "apart", ALLOWED),
        "MP chain of a block, producer there": (("atom.relaxed.cta.add r0, [f], 1",), (0, 0, 1), ALLOWED),
        "MP chain of plain operations": (("ld.relaxed.gpu r0, [f]; @r0=1 st.relaxed.gpu [f], 2",), "apart", ALLOWED),
        "MP chain acquired and released": (("ld.acquire.gpu r0, [f]; @r0=1 st.release.gpu [f], 2",), "apart",
                                           FORBIDDEN),
    }),
    **_shape(("st.weak [x], 1; st.release.{0} [f], 1", "atom.relaxed.gpu.add r0, [f], 1",
              "ld.acquire.gpu r1, [f]; ld.weak r2, [x]"), {"r1": 2, "r2": 0}, {
        # Each link has its scope, but release and acquire do not include each other.
        "MP chain, release of a block": (("cta",), (0, 0, 1), ALLOWED),
        "MP chain, release of the card": (("gpu",), (0, 0, 1), FORBIDDEN),
    }),
    # Store buffering: neither thread saw the other's write.
    **_shape(("st.{0} [x], 1; {1}; ld.{2} r0, [y]", "st.{0} [y], 1; {1}; ld.{2} r1, [x]"), {"r0": 0, "r1": 0}, {
        "SB relaxed": ((_GPU, "", _GPU), "apart", ALLOWED),
        "SB release acquire": (("release.gpu", "", "acquire.gpu"), "apart", ALLOWED),
        "SB fence.acq_rel": ((_GPU, _FENCES[0], _GPU), "apart", ALLOWED),
        "SB fence.sc": ((_GPU, _FENCES[1], _GPU), "apart", FORBIDDEN),
        "SB fence.sc, weak": (("weak", _FENCES[1], "weak"), "apart", FORBIDDEN),
        "SB fence.sc of a block": ((_GPU, "fence.sc.cta", _GPU), "apart", ALLOWED),
        "SB fence.sc in a block": ((_GPU, "fence.sc.cta", _GPU), "block", FORBIDDEN),
        "SB fence.sc of a cluster": ((_GPU, "fence.sc.cluster", _GPU), "apart", ALLOWED),
        "SB fence.sc in a cluster": ((_GPU, "fence.sc.cluster", _GPU), "cluster", FORBIDDEN),
        "SB in a block": ((_CTA, "", _CTA), "block", ALLOWED),
        "SB barrier": (("weak", "bar.sync", "weak"), "block", FORBIDDEN),
    }),
    **_shape(("st.relaxed.gpu [x], 1; {0}; ld.relaxed.gpu r0, [y]", "{1}; {2}; ld.relaxed.gpu r1, [x]"),
             {"r0": 0, "r1": 0}, {
        "SB one fence.sc": (("fence.sc.gpu", "st.relaxed.gpu [y], 1", "fence.acq_rel.gpu"), "apart", ALLOWED),
        "SB scopes of fence.sc": (("fence.sc.gpu", "st.relaxed.gpu [y], 1", "fence.sc.cta"), "apart", ALLOWED),
        "SB exchange": (("", "atom.acq_rel.gpu.exch r2, [y], 1", ""), "apart", ALLOWED),
    }),
    # Load buffering: both reads saw what the other thread writes after its own read.
    **_shape(("ld.{0} r0, [x]; {1}; st.{2} [y], 1", "ld.{0} r1, [y]; {1}; st.{2} [x], 1"), {"r0": 1, "r1": 1}, {
        "LB weak": (("weak", "", "weak"), "apart", ALLOWED),
        "LB relaxed": ((_GPU, "", _GPU), "apart", ALLOWED),
        "LB acquire": (("acquire.gpu", "", _GPU), "apart", ALLOWED),
        "LB release": ((_GPU, "", "release.gpu"), "apart", ALLOWED),
        "LB acquire release": (("acquire.gpu", "", "release.gpu"), "apart", FORBIDDEN),
        "LB acquire release of a block": (("acquire.cta", "", "release.cta"), "apart", ALLOWED),
        "LB fence.acq_rel": ((_GPU, _FENCES[0], _GPU), "apart", FORBIDDEN),
    }),
    **_shape(("ld.relaxed.gpu r0, [x]; {0}", "ld.relaxed.gpu r1, [y]; {1}"), {"r0": 1, "r1": 1}, {
        "LB one dependency": (("st.relaxed.gpu [y], r0", "st.relaxed.gpu [x], 1"), "apart", ALLOWED),
        "LB out of thin air": (("st.relaxed.gpu [y], r0", "st.relaxed.gpu [x], r1"), "apart", FORBIDDEN),
        "LB guards": (("@r0=1 st.relaxed.gpu [y], 1", "@r1=1 st.relaxed.gpu [x], 1"), "apart", FORBIDDEN),
    }),
    # Independent reads of independent writes: two threads saw two writes in opposite orders.
    **_shape(("st.{0} [x], 1", "st.{0} [y], 1", "ld.{1} r0, [x]; {2}; ld.{1} r1, [y]",
              "ld.{1} r2, [y]; {2}; ld.{1} r3, [x]"), {"r0": 1, "r1": 0, "r2": 1, "r3": 0}, {
        "IRIW relaxed": ((_GPU, _GPU, ""), "apart", ALLOWED),
        "IRIW acquire": ((_GPU, "acquire.gpu", ""), "apart", ALLOWED),
        "IRIW release acquire": (("release.gpu", "acquire.gpu", ""), "apart", ALLOWED),
        "IRIW fence.acq_rel": ((_GPU, _GPU, _FENCES[0]), "apart", ALLOWED),
        "IRIW fence.sc": ((_GPU, _GPU, _FENCES[1]), "apart", FORBIDDEN),
        "IRIW fence.sc, weak": (("weak", "weak", _FENCES[1]), "apart", ALLOWED),
        "IRIW fence.sc of a block": ((_GPU, _GPU, "fence.sc.cta"), "apart", ALLOWED),
        "IRIW fence.sc of a block, readers there": ((_GPU, _GPU, "fence.sc.cta"), (0, 1, 2, 2), FORBIDDEN),
    }),
    # Coherence of one location.
    **_shape(("st.{0} [x], 1", "ld.{1} r0, [x]; ld.{1} r1, [x]"), {"r0": 1, "r1": 0}, {
        "CoRR relaxed": ((_GPU, _GPU), "apart", FORBIDDEN),
        "CoRR weak reads": ((_GPU, "weak"), "apart", ALLOWED),
        "CoRR weak": (("weak", "weak"), "block", ALLOWED),
        "CoRR of a block": ((_CTA, _CTA), "apart", ALLOWED),
        "CoRR in a block": ((_CTA, _CTA), "block", FORBIDDEN),
    }),
    **_shape(("st.relaxed.gpu [x], 1; st.relaxed.gpu [x], 2",), {"x": 1},
             {"CoWW": ((), "block", FORBIDDEN)}, final="x"),
    **_shape(("ld.weak r0, [x]; st.weak [x], 1",), {"r0": 1}, {"CoRW1": ((), "block", FORBIDDEN)}),
    **_shape(("ld.{0} r0, [x]; st.{0} [x], 1", "st.{0} [x], 2"), {"r0": 2, "x": 2}, {
        "CoRW2": ((_GPU,), "apart", FORBIDDEN),
        "CoRW2 weak": (("weak",), "apart", ALLOWED),
    }, final="x"),
    **_shape(("st.{0} [x], 1; ld.{0} r0, [x]", "st.{0} [x], 2"), {"r0": 2, "x": 1}, {
        "CoWR": ((_GPU,), "apart", FORBIDDEN),
        "CoWR weak": (("weak",), "apart", ALLOWED),
    }, final="x"),
    # 2+2W: each thread's first write was the last.
    **_shape(("st.{0} [x], 1; {1}; st.{0} [y], 2", "st.{0} [y], 1; {1}; st.{0} [x], 2"), {"x": 1, "y": 1}, {
        "2+2W relaxed": ((_GPU, ""), "apart", ALLOWED),
        "2+2W release": (("release.gpu", ""), "apart", ALLOWED),
        "2+2W fence.acq_rel": ((_GPU, _FENCES[0]), "apart", ALLOWED),
        "2+2W fence.sc": ((_GPU, _FENCES[1]), "apart", FORBIDDEN),
        "2+2W fence.sc, weak": (("weak", _FENCES[1]), "apart", FORBIDDEN),
    }, final="x y"),
    # Write to read causality, and ISA2: what a thread has seen travels on with what it writes.
    **_shape(("st.{0} [x], 1", "ld.{1} r0, [x]; {2} [y], 1", "{3} r1, [y]; ld.{1} r2, [x]"),
             {"r0": 1, "r1": 1, "r2": 0}, {
        "WRC relaxed": ((_GPU, _GPU, "st.relaxed.gpu", "ld.relaxed.gpu"), "apart", ALLOWED),
        "WRC release acquire": ((_GPU, _GPU, "st.release.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "WRC release relaxed": ((_GPU, _GPU, "st.release.gpu", "ld.relaxed.gpu"), "apart", ALLOWED),
        "WRC relaxed acquire": ((_GPU, _GPU, "st.relaxed.gpu", "ld.acquire.gpu"), "apart", ALLOWED),
        "WRC fences": ((_GPU, _GPU, "fence.acq_rel.gpu; st.relaxed.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "WRC weak data": (("weak", "weak", "st.release.gpu", "ld.acquire.gpu"), "apart", ALLOWED),
        "WRC seen at the scope of a block": ((_CTA, _CTA, "st.release.gpu", "ld.acquire.gpu"), (0, 0, 1), FORBIDDEN),
        "WRC seen beyond its scope": ((_CTA, _CTA, "st.release.gpu", "ld.acquire.gpu"), (0, 1, 1), ALLOWED),
    }),
    **_shape(("st.weak [x], 1; st.{0} [y], 1", "ld.{1} r0, [y]; st.{2} [z], 1", "ld.{3} r1, [z]; ld.weak r2, [x]"),
             {"r0": 1, "r1": 1, "r2": 0}, {
        "ISA2": (("release.gpu", "acquire.gpu", "release.gpu", "acquire.gpu"), "apart", FORBIDDEN),
        "ISA2 relaxed release": ((_GPU, "acquire.gpu", "release.gpu", "acquire.gpu"), "apart", ALLOWED),
        "ISA2 relaxed acquire between": (("release.gpu", _GPU, "release.gpu", "acquire.gpu"), "apart", ALLOWED),
        "ISA2 relaxed release between": (("release.gpu", "acquire.gpu", _GPU, "acquire.gpu"), "apart", ALLOWED),
        "ISA2 relaxed acquire": (("release.gpu", "acquire.gpu", "release.gpu", _GPU), "apart", ALLOWED),
        "ISA2 block, then card": (("release.cta", "acquire.cta", "release.gpu", "acquire.gpu"), (0, 0, 1), FORBIDDEN),
        "ISA2 card, then block": (("release.gpu", "acquire.gpu", "release.cta", "acquire.cta"), (0, 1, 1), FORBIDDEN),
        "ISA2 block's scope to another": (("release.cta", "acquire.cta", "release.gpu", "acquire.gpu"), (0, 1, 1),
                                          ALLOWED),
        "ISA2 cluster": (("release.cluster", "acquire.cluster", "release.cluster", "acquire.cluster"), "cluster",
                         FORBIDDEN),
    }),
    **_shape(("st.weak [x], 1; bar.sync; st.weak [g], 0", "bar.sync; st.release.gpu [f], 1",
              "ld.acquire.gpu r0, [f]; ld.weak r1, [x]"), {"r0": 1, "r1": 0},
             {"ISA2 barrier, then release": ((), (0, 0, 1), FORBIDDEN)}),
    # R and S: a write that came last, against a read.
    **_shape(("st.{0} [x], 1; {1}; st.{2} [y], 1", "st.{2} [y], 2; {1}; ld.{3} r0, [x]"), {"r0": 0, "y": 2}, {
        "R relaxed": ((_GPU, "", _GPU, _GPU), "apart", ALLOWED),
        "R release acquire": ((_GPU, "", "release.gpu", "acquire.gpu"), "apart", ALLOWED),
        "R fence.acq_rel": ((_GPU, _FENCES[0], _GPU, _GPU), "apart", ALLOWED),
        "R fence.sc": ((_GPU, _FENCES[1], _GPU, _GPU), "apart", FORBIDDEN),
    }, final="y"),
    **_shape(("st.{0} [x], 2; {1} [y], 1", "{2} r0, [y]; st.{0} [x], 1"), {"r0": 1, "x": 2}, {
        "S relaxed": ((_GPU, "st.relaxed.gpu", "ld.relaxed.gpu"), "apart", ALLOWED),
        "S release acquire": ((_GPU, "st.release.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "S release acquire, weak": (("weak", "st.release.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
        "S release only": ((_GPU, "st.release.gpu", "ld.relaxed.gpu"), "apart", ALLOWED),
        "S fence": ((_GPU, "fence.acq_rel.gpu; st.relaxed.gpu", "ld.acquire.gpu"), "apart", FORBIDDEN),
    }, final="x"),
    # Atomicity.
    **_shape(("atom.relaxed.{0}.add r0, [x], 1", "atom.relaxed.{1}.add r1, [x], 1"), {"r0": 0, "r1": 0}, {
        "atomicity": (("gpu", "gpu"), "apart", FORBIDDEN),
        "atomicity in a block": (("cta", "cta"), "block", FORBIDDEN),
        "atomicity of a block, apart": (("cta", "gpu"), "apart", ALLOWED),
        "atomicity of a cluster, apart": (("cluster", "gpu"), "apart", ALLOWED),
        "atomicity of a cluster": (("cluster", "gpu"), "cluster", FORBIDDEN),
    }),
    **_shape(("atom.relaxed.gpu.cas r0, [x], 0, 1", "atom.relaxed.gpu.cas r1, [x], 0, 2"), {"r0": 0, "r1": 0},
             {"atomicity of cas": ((), "apart", FORBIDDEN)}),
    **_shape(("atom.relaxed.gpu.add r0, [x], 1", "st.{0} [x], 5"), {"r0": 0, "x": 1}, {
        "atomicity and a store": ((_GPU,), "apart", FORBIDDEN),
        "atomicity and a weak store": (("weak",), "apart", ALLOWED),
    }, final="x"),
}  # fmt: skip
