"""`jitmx.greedy_sample`: the next token of each request from its logits."""

from __future__ import annotations

import torch

from jitmx.dispatch.choose import choose
from jitmx.errors import InputError
from jitmx.kernels import sampling
from jitmx.kernels.sampling import MAX_ROWS, MAX_VOCAB, SamplingProblem
from jitmx.ops import checks, custom
from jitmx.runtime import card, plan
from jitmx.runtime.alike import alike
from jitmx.runtime.plan import Plans, Step

_TAKES = ("logits", "requests", "lengths", "prompts", "tokens", "num_sampled", "num_rejected")

_plans = Plans()
# Of `sample_requests`, by rows: whether the tensors of a call are like those of the last one, and its launch.
_recent = Plans()


class Plan(plan.Plan):
    """The launch of logits of one shape."""

    def __init__(self, logits: torch.Tensor, stride: int) -> None:
        rows, vocab = logits.numel() // logits.shape[-1], logits.shape[-1]
        device = card.number(logits.device)
        problem = SamplingProblem(rows, vocab, checks.DTYPES[logits.dtype])
        choice = choose("sampling", problem, card.arch(device), multiprocessors=card.multiprocessors(device))
        geometry = sampling.launch(choice.variant.knobs, problem, choice.multiprocessors)
        shift = sampling.parts_of(geometry, rows).bit_length() - 1
        fixed = {"stride": stride, "vocab": vocab, "shift": shift}
        step = Step(choice.variant, device, geometry, fixed, _TAKES)
        self.steps = (step,)
        self.run = step.run


def greedy_sample(logits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """argmax over the last dimension: the token that greedy decoding takes next.

    The lowest index of several that share the largest value; both zeros are one value; a NaN is never the largest, and
    a row of nothing else has index 0. One launch, on the current stream of the logits' device, under `torch.cuda.graph`
    and `torch.compile` too.

    Args:
        logits: [..., vocab], bfloat16, float16 or float32, on a GPU. Values of a row follow one another; rows may lie
            apart, such as those of a slice of padded ones.
        out: [...], int64, contiguous; written and returned. It must not overlap the logits.

    Returns:
        [...], int64.

    Raises:
        InputError: a device, dtype, shape or layout that the kernel cannot take, or a tensor that requires a gradient;
            nothing was launched.
        CaptureError: the kernel would have to be compiled or loaded during CUDA-graph capture.

    Source: templates/sampling/greedy.cu.j2; reference: jitmx.kernels.sampling.reference.
    """
    if type(logits) is not torch.Tensor or torch.compiler.is_compiling():
        checks.require_tensor("logits", logits)
        found: torch.Tensor = torch.ops.jitmx.greedy_sample(logits)
        return custom.into(out, found)
    return run(logits, out)


def run(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`greedy_sample` on plain tensors."""
    made = _found(logits)
    if logits.requires_grad:
        checks.require_no_grad("logits", logits)
    if out is None:
        out = logits.new_empty(logits.shape[:-1], dtype=torch.int64)
    else:
        checks.require_cuda("out", out)
        right = out.dtype is torch.int64 and out.shape == logits.shape[:-1] and out.device == logits.device
        if not right or not out.is_contiguous():
            wanted = f"contiguous int64 {list(logits.shape[:-1])} on {logits.device}"
            raise InputError(f"out is {checks.describe(out)}; it must be {wanted}")
        checks.require_apart(out, logits=logits)
    if made is not None:
        made.run(logits.data_ptr(), 0, 0, 0, out.data_ptr(), 0, 0)
    return out


def sample_requests(
    logits: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor, prompts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of requests with one row of logits each, and how many each gets by it, in one launch.

    What vLLM's sampler tells of a batch that is decoded greedily. Where tensors lie is checked, and no value of them.

    Args:
        logits: [rows, vocab], as for `greedy_sample`.
        requests: int64 [rows], where in `prompts` each request is; more behind them are padding.
        lengths: int32 [rows], tokens of each that have been read behind this step; as above.
        prompts: int32, of any number of requests: tokens that are read before one is sampled. They may lie in memory of
            the host that the GPU reads.

    Returns:
        Tokens int64 [rows, 1]; int32 [rows], tokens sampled: 0 of a request that is still being read (its length is
        below that of its prompt), 1 of others; int32 [rows], tokens rejected: 0.

    Raises:
        InputError: as `greedy_sample` does, or tensors that do not go together; nothing was launched.
    """
    try:
        rows = logits.shape[0]
        same, made = _recent[rows]
        known = same(logits, requests, lengths, prompts)
    except (KeyError, AttributeError, IndexError, TypeError):
        known = False
    if not known:
        made = _found(logits)
        _require_requests(logits, requests, lengths, prompts)
        rows = logits.shape[0]
        _recent.remember(rows, (alike((logits, requests, lengths, prompts)), made))
    tokens, sampled, rejected = requests.new_empty(rows, 1), lengths.new_empty(rows), lengths.new_empty(rows)
    if made is not None:
        made.run(
            logits.data_ptr(), requests.data_ptr(), lengths.data_ptr(), prompts.data_ptr(), tokens.data_ptr(),
            sampled.data_ptr(), rejected.data_ptr(),
        )  # fmt: skip
    return tokens, sampled, rejected


def _require_requests(
    logits: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor, prompts: torch.Tensor
) -> None:
    """Raise InputError where they do not go together."""
    if (
        logits.dim() != 2 or requests.numel() < logits.shape[0] or lengths.numel() < logits.shape[0]
        or requests.dtype is not torch.int64 or lengths.dtype is not torch.int32 or prompts.dtype is not torch.int32
        or not (requests.is_contiguous() and lengths.is_contiguous() and prompts.is_contiguous())
        or not requests.device == lengths.device == logits.device
    ):  # fmt: skip
        raise InputError(
            f"logits are {checks.describe(logits)}, requests {checks.describe(requests)}, lengths "
            f"{checks.describe(lengths)} and prompts {checks.describe(prompts)}; they must be [rows, vocab], int64 and "
            "int32 of as many rows or more, on one GPU, and int32, contiguous but for the rows of the logits"
        )


def _found(logits: torch.Tensor) -> Plan | None:
    """The launch for these logits; None where there are none."""
    try:
        key = logits.shape, logits.stride(), logits.dtype, logits.get_device()
        found: Plan | None = _plans[key]
    except (KeyError, AttributeError, TypeError):
        found = _plan(logits)
    return found


def _plan(logits: torch.Tensor) -> Plan | None:
    checks.require_cuda("logits", logits)
    _require(logits)
    stride = checks.row_stride(logits)
    if stride is None:
        said = f"logits have strides {list(logits.stride())}"
        raise InputError(
            f"{said}; values of a row must follow one another, and rows lie evenly", "pass a contiguous copy"
        )
    made = Plan(logits, stride) if logits.numel() else None
    return _plans.remember((logits.shape, logits.stride(), logits.dtype, logits.get_device()), made)


def _require(logits: torch.Tensor) -> None:
    """Raise InputError where dtype or shape are none that the kernel takes."""
    if logits.dtype not in checks.DTYPES:
        raise InputError(f"logits are {checks.describe(logits)}", "greedy_sample takes bfloat16, float16 or float32")
    if logits.dim() == 0 or not 1 <= logits.shape[-1] <= MAX_VOCAB:
        raise InputError(f"logits have shape {list(logits.shape)}; a row has 1 to {MAX_VOCAB} of them")
    if logits.numel() // logits.shape[-1] > MAX_ROWS:
        raise InputError(f"logits have shape {list(logits.shape)}, over {MAX_ROWS} rows")


def _run_operator(logits: torch.Tensor) -> torch.Tensor:
    return run(custom.plain(logits))


def _fake_operator(logits: torch.Tensor) -> torch.Tensor:
    custom.refuse_gradients(logits=logits)
    _require(logits)
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


custom.define("greedy_sample(Tensor logits) -> Tensor", _run_operator, _fake_operator)
