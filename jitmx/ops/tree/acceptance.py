"""`jitmx.accept_greedy` and `jitmx.tree_verify`: what a target accepts of chains and of trees of drafts."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitmx.errors import InputError
from jitmx.ops import checks, custom
from jitmx.ops.tree import calls
from jitmx.ops.tree.calls import IDS, INT32
from jitmx.quoting import short
from jitmx.runtime.alike import alike
from jitmx.runtime.plan import Plans, Step


class Accepted(NamedTuple):
    """What a target accepts of chains of drafts.

    Attributes:
        tokens: int64 [batch, max_drafts + 1]: the drafts accepted, the target's token behind them, then -1.
        accepted: int32 [batch], drafts; accepted + 1 tokens are new.
        next_token: int64 [batch], the target's token; -1 of a request without a row.
        next_positions: int64 [batch], its position: that of the request's first row and accepted + 1.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    next_token: torch.Tensor
    next_positions: torch.Tensor


class Verified(NamedTuple):
    """What a target accepts of trees of drafts.

    Attributes:
        path: int32 [batch, levels], the nodes accepted, from the root on, then -1.
        accepted: int32 [batch], nodes behind the root; accepted + 1 tokens are new.
        tokens: int64 [batch, levels], tokens of these nodes, the target's behind the last, then -1.
        next_token: int64 [batch], the target's behind the last.
        next_positions: int64 [batch], its position: the root's and accepted + 1; also how many tokens of the sequence
            lie in the cache once `move_kv` has moved them.
    """

    path: torch.Tensor
    accepted: torch.Tensor
    tokens: torch.Tensor
    next_token: torch.Tensor
    next_positions: torch.Tensor


def accept_greedy(
    drafts: torch.Tensor,
    target: torch.Tensor,
    *,
    cu_num_drafts: torch.Tensor | None = None,
    cu_num_rows: torch.Tensor | None = None,
    max_drafts: int | None = None,
    positions: torch.Tensor | None = None,
) -> Accepted:
    """Which drafts of a chain a greedy target accepts: those before the first that is not what it says, in one launch.

    Nothing is read back; it works under `torch.cuda.graph` and `torch.compile`. Values of tensors are not checked.

    Args:
        drafts: int32 or int64, contiguous, below 0: a placeholder, which is never accepted. [batch, k]; or flat beside
            cu_num_drafts, those of one request behind those of another; or [rows] beside cu_num_rows.
        target: int32 or int64, contiguous, the target's argmax behind each row: [batch, k + 1]; or flat, of each
            request a row more than it has drafts.
        cu_num_drafts: int32 [batch], drafts of each request and all before it.
        cu_num_rows: int32 [batch + 1], rows before each request, and of all. A row's own token is then in `drafts`: the
            first of a request is not looked at, and the others are its drafts. A request may have no row.
        max_drafts: of a request at most; with a flat target, in the place of k.
        positions: int32 or int64 [batch], of the first row of each request; 0 by default.

    Returns:
        `Accepted`: tokens [batch, k + 1], how many drafts are accepted, the next token and its position.

    Raises:
        InputError: a device, dtype, shape or number that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/tree/accept.cu.j2; reference: jitmx.kernels.tree.reference.accept.
    """
    if type(drafts) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("drafts", drafts)
        made = torch.ops.jitmx.accept_greedy(drafts, target, cu_num_drafts, cu_num_rows, max_drafts, positions)
        return Accepted(*made)
    return Accepted(*run_accept(drafts, target, cu_num_drafts, cu_num_rows, max_drafts, positions))


def _check_accept(
    drafts: torch.Tensor, target: torch.Tensor, cu_num_drafts: torch.Tensor | None, cu_num_rows: torch.Tensor | None,
    max_drafts: int | None, positions: torch.Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Requests, and drafts of one at most."""
    if cu_num_drafts is None and cu_num_rows is None:
        if max_drafts is not None:
            raise InputError("max_drafts is for a flat target", "leave it out, or pass cu_num_drafts or cu_num_rows")
        calls.require("drafts", drafts, IDS, ("batch", "k"))
        batch, most = drafts.shape
        calls.require("target", target, IDS, (batch, most + 1), drafts)
    else:
        if cu_num_drafts is not None and cu_num_rows is not None:
            raise InputError("cu_num_drafts and cu_num_rows are both given", "pass one of them")
        calls.require("drafts", drafts, IDS, ("drafts",))
        if cu_num_rows is not None:
            calls.require("cu_num_rows", cu_num_rows, INT32, ("batch + 1",), drafts)
            calls.require("target", target, IDS, (drafts.shape[0],), drafts)
            batch = cu_num_rows.numel() - 1
        else:
            calls.require("cu_num_drafts", cu_num_drafts, INT32, ("batch",), drafts)
            calls.require("target", target, IDS, ("drafts + batch",), drafts)
            assert cu_num_drafts is not None
            batch = cu_num_drafts.numel()
        if batch < 0:
            raise InputError("cu_num_rows is empty; it has one element more than there are requests")
        if type(max_drafts) is not int or not 0 <= max_drafts < 1 << 20:
            raise InputError(f"max_drafts={max_drafts!r}: a flat target takes drafts of a request at most, as a number")
        most = max_drafts
    calls.require_sizes(batch, 1)
    if positions is not None:
        calls.require("positions", positions, IDS, (batch,), drafts)
    return batch, most


def _new_accepted(like: torch.Tensor, batch: int, most: int) -> tuple[torch.Tensor, ...]:
    wide, narrow = {"dtype": torch.int64}, {"dtype": torch.int32}
    return (
        like.new_empty((batch, most + 1), **wide), like.new_empty(batch, **narrow), like.new_empty(batch, **wide),
        like.new_empty(batch, **wide),
    )  # fmt: skip


def run_accept(
    drafts: torch.Tensor, target: torch.Tensor, cu_num_drafts: torch.Tensor | None = None,
    cu_num_rows: torch.Tensor | None = None, max_drafts: int | None = None, positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`accept_greedy` on plain tensors."""
    given = (drafts, target, cu_num_drafts, cu_num_rows, positions)
    step, batch, most = _planned(given, (), max_drafts)
    made = _new_accepted(drafts, batch, most)
    if step is not None:
        ends = cu_num_drafts if cu_num_rows is None else cu_num_rows
        step.run(*map(calls.address, (drafts, target, ends, positions)), 0, 0, 0, *map(calls.address, made), 0, 0)
    return made


# Of each kind of call the last one: whether another's tensors are like its, and what was planned for it.
_recent = Plans()


def _planned(
    given: tuple[Any, ...], of: tuple[torch.Tensor, ...], max_drafts: int | None
) -> tuple[Step | None, int, int]:
    """The launch, requests, and drafts of one at most, for the tensors of `run_accept`, and `of` `accept_requests`.

    A call whose tensors are like those of the last one of its kind is not checked again.
    """
    drafts, target, cu_num_drafts, cu_num_rows, positions = given
    kind = *(one is None for one in given), len(of), max_drafts
    tensors = [one for one in given if one is not None]
    try:
        known = _recent.get(kind)
    except TypeError:  # max_drafts is no number, and refused below
        known = None
    if known is None or not known[0](*tensors, *of):
        checks.require_cuda("drafts", drafts)
        batch, most = _check_accept(drafts, target, cu_num_drafts, cu_num_rows, max_drafts, positions)
        if of:
            _check_requests(of[0], of[1], of[2], batch, drafts.device)
        step = None
        if batch:
            step = calls.step(
                "accept", batch, drafts.device, drafts_each=most, rows_counted=int(cu_num_rows is not None),
                wide=calls.wide(drafts, target, positions),
            )  # fmt: skip
        known = _recent.remember(kind, (alike([*tensors, *of]), step, batch, most))
    found: tuple[Step | None, int, int] = known[1:]
    return found


def _check_requests(
    requests: torch.Tensor, lengths: torch.Tensor, prompts: torch.Tensor, batch: int, device: torch.device
) -> None:
    """Raise InputError where they do not go with so many requests."""
    if (
        requests.numel() < batch or lengths.numel() < batch
        or requests.dtype is not torch.int64 or lengths.dtype is not torch.int32 or prompts.dtype is not torch.int32
        or not (requests.is_contiguous() and lengths.is_contiguous() and prompts.is_contiguous())
        or not requests.device == lengths.device == device
    ):  # fmt: skip
        raise InputError(
            f"requests are {checks.describe(requests)}, lengths {checks.describe(lengths)} and prompts "
            f"{checks.describe(prompts)}; they must be contiguous int64 and int32 of {batch} requests or more on "
            f"{device}, and int32"
        )


def accept_requests(
    drafts: torch.Tensor, target: torch.Tensor, cu_num_rows: torch.Tensor, max_drafts: int, requests: torch.Tensor,
    lengths: torch.Tensor, prompts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tokens of requests with their drafts, how many each gets, and how many of its rows come to nothing.

    What vLLM's rejection sampler tells of a batch that is decoded greedily, in one launch. Where tensors lie is
    checked, and no value of them.

    Args:
        drafts, target, cu_num_rows, max_drafts: as for `accept_greedy`, of rows.
        requests: int64 [batch], where in `prompts` each request is; more behind them are padding.
        lengths: int32 [batch], tokens of each that have been read behind this step; as above.
        prompts: int32, of any number of requests: tokens that are read before one is sampled. They may lie in memory of
            the host that the GPU reads.

    Returns:
        Tokens int64 [batch, max_drafts + 1]; int32 [batch], tokens sampled: 0 of a request that is still being read
        (its length is below that of its prompt), else those accepted and one; int32 [batch], tokens rejected: 0 of such
        a request, else its other rows.

    Raises:
        InputError: as `accept_greedy` does, or tensors that do not go together; nothing was launched.
    """
    step, batch, most = _planned((drafts, target, None, cu_num_rows, None), (requests, lengths, prompts), max_drafts)
    made = _new_accepted(drafts, batch, most)
    sampled, rejected = torch.empty_like(made[1]), torch.empty_like(made[1])
    if step is not None:
        given = (drafts, target, cu_num_rows, None, requests, lengths, prompts, *made, sampled, rejected)
        step.run(*map(calls.address, given))
    return made[0], sampled, rejected


def tree_verify(
    tokens: torch.Tensor,
    target: torch.Tensor,
    parents: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    levels: int | None = None,
    probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    threshold: float | None = None,
    alpha: float = 0.3,
) -> Verified:
    """The longest path of each tree that the target accepts, and the token behind it, in one launch.

    A node is accepted where its token is what the target says behind its parent, and its parent is accepted. With
    `probs` also where the target finds it likely enough there: at least `threshold`, or with `entropy` at least the
    lesser of `threshold` and alpha exp(-entropy), which is typical acceptance. Of paths of one length the one whose
    last node comes first is taken: the one that a draft has put first. Where `target` is sampled and not the argmax,
    what comes out without `probs` is distributed as the target's own tokens are.

    Nothing is read back; it works under `torch.cuda.graph` and `torch.compile`. Values of tensors are not checked.

    Args:
        tokens: int32 or int64 [batch, nodes], nodes as for `tree_plan`; below 0: never accepted.
        target: int32 or int64 [batch, nodes], the target's token behind each node.
        parents: int32 [batch, nodes], or [nodes] of all.
        starts: int32 or int64 [batch], the position of each root; 0 by default.
        levels: nodes of a path at most, the root included; by default all. Longer ones are cut.
        probs: float32 [batch, nodes, vocab], the target's probabilities behind each node.
        entropy: float32 [batch, nodes], of these, in natural logarithms.
        threshold: with `probs`, above 0.
        alpha: with `entropy`, above 0.

    Returns:
        `Verified`: path and tokens [batch, levels], how many drafts are accepted, the next token and its position.

    Raises:
        InputError: a device, dtype, shape or number that the kernel cannot take; nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/tree/verify.cu.j2; reference: jitmx.kernels.tree.reference.verify.
    """
    if type(tokens) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("tokens", tokens)
        made = torch.ops.jitmx.tree_verify(tokens, target, parents, starts, probs, entropy, levels, threshold, alpha)
        return Verified(*made)
    return Verified(*run_verify(tokens, target, parents, starts, probs, entropy, levels, threshold, alpha))


def _check_verify(
    tokens: torch.Tensor, target: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor | None,
    probs: torch.Tensor | None, entropy: torch.Tensor | None, levels: int | None, threshold: float | None, alpha: float,
) -> int:  # fmt: skip
    """Nodes of a path at most."""
    calls.require("tokens", tokens, IDS, ("batch", "nodes"))
    batch, nodes = tokens.shape
    calls.require_sizes(batch, nodes)
    calls.require("target", target, IDS, (batch, nodes), tokens)
    shared = checks.require_tensor("parents", parents).dim() == 1
    calls.require("parents", parents, INT32, (nodes,) if shared else (batch, nodes), tokens)
    calls.require_starts(starts, batch, tokens)
    if (probs is None) != (threshold is None) or (probs is None and entropy is not None):
        raise InputError("probs and threshold go together, and entropy beside them", "pass both, or neither")
    for name, number in (("threshold", threshold), ("alpha", alpha)):
        if not checks.is_positive(number) and (name == "alpha" or probs is not None):
            raise InputError(f"{name}={short(number)} is not a finite number above 0 in float32")
    if probs is not None:
        calls.require("probs", probs, (torch.float32,), (batch, nodes, "vocab"), tokens)
    if entropy is not None:
        calls.require("entropy", entropy, (torch.float32,), (batch, nodes), tokens)
    return calls.require_levels(levels, nodes)


def _new_verified(tokens: torch.Tensor, levels: int) -> tuple[torch.Tensor, ...]:
    batch = tokens.shape[0]
    wide, narrow = {"dtype": torch.int64}, {"dtype": torch.int32}
    return (
        tokens.new_empty((batch, levels), **narrow), tokens.new_empty(batch, **narrow),
        tokens.new_empty((batch, levels), **wide), tokens.new_empty(batch, **wide), tokens.new_empty(batch, **wide),
    )  # fmt: skip


def run_verify(
    tokens: torch.Tensor, target: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor | None = None,
    probs: torch.Tensor | None = None, entropy: torch.Tensor | None = None, levels: int | None = None,
    threshold: float | None = None, alpha: float = 0.3,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`tree_verify` on plain tensors."""
    checks.require_cuda("tokens", tokens)
    width = _check_verify(tokens, target, parents, starts, probs, entropy, levels, threshold, alpha)
    made = _new_verified(tokens, width)
    batch, nodes = tokens.shape
    if batch:
        step = calls.step(
            "verify", batch, tokens.device, vocab=0 if probs is None else probs.shape[2],
            stride=0 if parents.dim() == 1 else nodes, nodes=nodes, width=width,
            wide=calls.wide(tokens, target, starts), threshold=threshold or 0.0, alpha=alpha,
        )  # fmt: skip
        given = tokens, target, parents, probs, entropy, starts
        step.run(*map(calls.address, given), *map(calls.address, made))
    return made


def _run_accept(
    drafts: torch.Tensor, target: torch.Tensor, cu_num_drafts: torch.Tensor | None, cu_num_rows: torch.Tensor | None,
    max_drafts: int | None, positions: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    drafts, target, positions = map(custom.plain, (drafts, target, positions))
    cu_num_drafts, cu_num_rows = map(custom.plain, (cu_num_drafts, cu_num_rows))
    return run_accept(drafts, target, cu_num_drafts, cu_num_rows, max_drafts, positions)


def _fake_accept(
    drafts: torch.Tensor, target: torch.Tensor, cu_num_drafts: torch.Tensor | None, cu_num_rows: torch.Tensor | None,
    max_drafts: int | None, positions: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _new_accepted(drafts, *_check_accept(drafts, target, cu_num_drafts, cu_num_rows, max_drafts, positions))


def _run_verify(
    tokens: torch.Tensor, target: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor | None,
    probs: torch.Tensor | None, entropy: torch.Tensor | None, levels: int | None, threshold: float | None, alpha: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    tokens, target, parents = map(custom.plain, (tokens, target, parents))
    starts, probs, entropy = map(custom.plain, (starts, probs, entropy))
    return run_verify(tokens, target, parents, starts, probs, entropy, levels, threshold, alpha)


def _fake_verify(
    tokens: torch.Tensor, target: torch.Tensor, parents: torch.Tensor, starts: torch.Tensor | None,
    probs: torch.Tensor | None, entropy: torch.Tensor | None, levels: int | None, threshold: float | None, alpha: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    custom.refuse_gradients(probs=probs, entropy=entropy)
    width = _check_verify(tokens, target, parents, starts, probs, entropy, levels, threshold, alpha)
    return _new_verified(tokens, width)


custom.define(
    "accept_greedy(Tensor drafts, Tensor target, Tensor? cu_num_drafts, Tensor? cu_num_rows, int? max_drafts, "
    "Tensor? positions) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_accept,
    _fake_accept,
)
custom.define(
    "tree_verify(Tensor tokens, Tensor target, Tensor parents, Tensor? starts, Tensor? probs, Tensor? entropy, "
    "int? levels, float? threshold, float alpha) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run_verify,
    _fake_verify,
)
