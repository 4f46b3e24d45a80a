"""`tree.verify`: the longest path of a tree that the target takes, and what comes behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jitmx.kernels.tree import reference
from jitmx.kernels.tree.problem import KINDS, STARTS, Array, exact, ids, random_parents, spec
from jitmx.registry.arguments import Arguments, number, reads, writes
from jitmx.registry.case import Buffer, Case
from jitmx.registry.launch import Launch
from jitmx.registry.spec import Variant

VERIFY = spec(
    "verify",
    Arguments(
        "VerifyArguments",
        reads("tokens", "[batch, nodes], int or long long; below 0: fits nowhere"),
        reads("target", "[batch, nodes], the target's token behind each node, int or long long"),
        reads("parents", "[batch, nodes], or [nodes] of all", "int"),
        reads("probs", "[batch, nodes, vocab], the target's probabilities behind each node; or 0", "float"),
        reads("entropy", "[batch, nodes], of these, in natural logarithms; or 0", "float"),
        STARTS,
        writes("path", "[batch, width], nodes from the root on, then -1", "int"),
        writes("accepted", "[batch], nodes of the path behind the root", "int"),
        writes("out_tokens", "[batch, width], of these nodes, then the target's, then -1", "long long"),
        writes("next_token", "[batch], the target's behind the path", "long long"),
        writes("next_positions", "[batch], of that token", "long long"),
        number("vocab", "unsigned long long", "probabilities of a node"),
        number("stride", "unsigned int", "parents from a request to the next"),
        number("nodes", "unsigned int", "of a tree, 1 to 64"),
        number("width", "unsigned int", "nodes of a path at most, 1 or more"),
        number("wide", "unsigned int", "bits: 1 tokens, 2 target, 4 starts are of 64 bits"),
        number("threshold", "float", "probability from which a token is likely enough"),
        number("alpha", "float", "with entropy: alpha exp(-entropy), where that is less"),
    ),
    threads=32,
    require=(r"\bREDUX\b",),
)

FIXED = ("vocab", "stride", "nodes", "width", "wide")


def verified(
    tokens: Array, target: Array, parents: Array, width: int, starts: Array, likely: Array | None
) -> dict[str, Array]:
    """What the kernel writes, by field."""
    batch = len(tokens)
    paths = [
        reference.verify(
            tokens[r].tolist(), target[r].tolist(), parents[r].tolist(), width,
            None if likely is None else likely[r].tolist(),
        )
        for r in range(batch)
    ]  # fmt: skip
    behind = [[*(int(tokens[r, node]) for node in path[1:]), int(target[r, path[-1]])] for r, path in enumerate(paths)]
    accepted = np.array([len(path) - 1 for path in paths], np.int32)
    return {
        "path": np.array([reference.filled(path, width, np.int32) for path in paths]),
        "accepted": accepted,
        "out_tokens": np.array([reference.filled(tokens, width) for tokens in behind]),
        "next_token": np.array([tokens[-1] for tokens in behind], np.int64),
        "next_positions": starts + accepted + 1,
    }


def likely_nodes(
    tokens: Array, parents: Array, probs: Array, threshold: float, alpha: float, entropy: Array | None
) -> Array:
    """Which nodes are likely enough behind their parents, [batch, nodes]."""
    found = np.zeros(tokens.shape, bool)
    for r, i in np.ndindex(*tokens.shape):
        above, token = parents[r, i], tokens[r, i]
        if 0 <= above < i and 0 <= token < probs.shape[-1]:
            bound = reference.limit(threshold, alpha, None if entropy is None else float(entropy[r, above]))
            found[r, i] = probs[r, above, token] >= np.float32(bound)
    return found


def _case(
    nodes: int, width: int, seed: int, wide: int, rule: str = "greedy", *, shared: bool = False, placed: bool = True,
    times: int = 2,
) -> Case:  # fmt: skip
    """Trees of every kind, whose tokens are of few values, so that many fit."""
    generator = np.random.default_rng(seed)
    kinds = ("bushy",) if shared else KINDS * times
    parents = np.stack([random_parents(nodes, generator, kind) for kind in kinds])
    parents[:, 0] = generator.choice([-1, 0, 5], len(kinds))  # the root's is not looked at
    batch = 5 if shared else len(kinds)
    few = np.resize([2, 3, 1], batch)[:, None]
    tokens, target = (generator.integers(0, few, (batch, nodes)) for _ in range(2))
    tokens[generator.random(tokens.shape) < 0.15] = -1
    target[generator.random(tokens.shape) < 0.15] = -1
    if wide & 3 == 3 and rule == "greedy":
        tokens, target = (np.where(x < 0, x, x + (1 << 33)) for x in (tokens, target))
        tokens[(tokens >= 0) & (generator.random(tokens.shape) < 0.1)] += 1 << 32  # which the lower word does not tell
    starts = generator.integers(0, 1 << (40 if wide & 4 else 20), batch)
    of_all = np.resize(parents, (batch, nodes))
    values: dict[str, Any] = {
        "tokens": Buffer(ids(tokens, bool(wide & 1))), "target": Buffer(ids(target, bool(wide & 2))),
        "parents": Buffer(parents),
    }  # fmt: skip
    likely = None
    if rule != "greedy":
        vocab, threshold, alpha = 5, 0.3, 0.5
        probs = generator.dirichlet(np.full(vocab, 0.5), (batch, nodes)).astype(np.float32)
        probs[generator.random(probs.shape) < 0.1] = np.float32(threshold)  # as much as is asked for
        probs[generator.random(probs.shape) < 0.05] = np.nan
        tokens[generator.random(tokens.shape) < 0.05] = vocab
        if wide & 1:  # the lower word is a token
            tokens[(tokens >= 0) & (generator.random(tokens.shape) < 0.05)] += 1 << 32
        values["tokens"] = Buffer(ids(tokens, bool(wide & 1)))
        entropy = None
        if rule == "typical":
            entropy = generator.uniform(0, 2, (batch, nodes)).astype(np.float32)
            entropy[np.arange(batch) % 3 == 1] += 2  # of these requests tokens are likely that are not of others
            entropy[np.arange(batch) % 5 == 2] = np.nan  # which leaves the threshold
            entropy[generator.random(entropy.shape) < 0.05] = np.inf
            probs[np.abs(probs - alpha * np.exp(-entropy)[..., None]) < 1e-4] = 0
            values["entropy"] = Buffer(entropy)
        likely = likely_nodes(tokens, of_all, probs, threshold, alpha, entropy)
        values |= {"probs": Buffer(probs), "vocab": vocab, "threshold": threshold, "alpha": alpha}
    wanted = verified(tokens, target, of_all, width, starts if placed else np.zeros(batch, np.int64), likely)
    if placed:
        values["starts"] = Buffer(ids(starts, bool(wide & 4)))
    outputs, check = exact(wanted)
    longest = verified(tokens, target, of_all, nodes, starts, likely)["accepted"]
    values |= outputs | {"stride": 0 if shared else nodes, "nodes": nodes, "width": width, "wide": wide}
    return Case(
        name=f"{batch} trees of {nodes}, {rule}, paths of {width}",
        launch=Launch(batch),
        values=values,
        check=check,
        gate=0.0,
        sides={
            "nothing is taken": bool((wanted["accepted"] == 0).any()),
            "a path is cut": bool((longest > wanted["accepted"]).any()),
            "a path of all its width": bool((wanted["accepted"] == width - 1).any()),
            "a node of the second word": bool((wanted["path"] >= 32).any()),
        },
        fixed=FIXED,
    )


def cases(variant: Variant) -> Iterator[Case]:
    """Every rule, trees of few and many nodes; the last of very many."""
    yield _case(1, 1, 0, 0)
    yield _case(9, 4, 1, 1, placed=False)
    yield _case(32, 32, 2, 2)
    yield _case(40, 3, 3, 7)
    yield _case(64, 64, 4, 4, "thresholds")
    yield _case(33, 9, 5, 3, "typical")
    yield _case(2, 2, 8, 3, "typical", times=12)  # the rule alone says which are taken
    yield _case(31, 5, 6, 0, "thresholds", shared=True)
    yield _far()


def _far() -> Case:
    """The last of requests whose probabilities are over 2^32 of them."""
    batch, nodes, vocab = 1 << 15, 64, 2100
    generator = np.random.default_rng(7)
    parents, tokens = random_parents(nodes, generator, "chain")[None], generator.integers(0, vocab, (1, nodes))
    probs = np.zeros((1, nodes, vocab), np.float32)
    probs[0, parents[0, 1:], tokens[0, 1:]] = 0.5
    likely = likely_nodes(tokens, parents, probs, 0.4, 0.0, None)
    wanted = verified(tokens, tokens - 1, parents, nodes, np.array([9]), likely)
    outputs, check = exact(wanted)
    values: dict[str, Any] = {
        "tokens": Buffer(tokens), "target": Buffer(tokens - 1), "parents": Buffer(parents), "probs": Buffer(probs),
        "starts": Buffer(np.array([9])), **outputs,
    }  # fmt: skip
    for name, item in values.items():
        before = (batch - 1) * item.data.nbytes
        values[name] = item.spread([before], before + item.data.nbytes)
    values |= {"vocab": vocab, "stride": nodes, "nodes": nodes, "width": nodes, "wide": 7, "threshold": 0.4}
    return Case(
        name=f"the last of {batch} trees", launch=Launch(batch), values=values, check=check, gate=0.0,
        blocks=(batch - 1,), fixed=FIXED,
    )  # fmt: skip
