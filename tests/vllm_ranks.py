"""Ranks of vLLM, each a process: forked from one that has imported vLLM, which takes longer than what most ranks do."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

TESTS = Path(__file__).parent


class Ranks:
    """Runs scripts as `python -c` would, each process with modules imported and nothing else done before."""

    def __init__(self) -> None:
        self._parent: subprocess.Popen[str] | None = None

    def run(self, script: str, arguments: list[list[str]], folder: Path, timeout: float = 480) -> None:
        """A process for each list of arguments, all at once, with the environment of now; they must succeed.

        Args:
            folder: where what they print is kept.
        """
        if self._parent is None:
            code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import vllm_ranks; vllm_ranks.serve()"
            self._parent = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._parent.stdin is not None and self._parent.stdout is not None
        logs = [folder / f"rank{rank}.log" for rank in range(len(arguments))]
        asked = {"script": script, "arguments": arguments, "logs": [*map(str, logs)], "timeout": timeout}
        self._parent.stdin.write(json.dumps(asked | {"environment": dict(os.environ)}) + "\n")
        self._parent.stdin.flush()
        said = self._parent.stdout.readline()
        printed = "\n".join(log.read_text() for log in logs if log.is_file())
        assert said, f"what ranks are forked from has ended\n{printed}"
        assert json.loads(said) == [0] * len(arguments), f"statuses {said}{printed}"

    def end(self) -> None:
        if self._parent is not None:
            self._parent.communicate(timeout=60)


def serve() -> None:
    """Be what ranks are forked from, until nobody asks any more."""
    with contextlib.redirect_stdout(sys.stderr):
        _import()
    gc.freeze()  # modules stay: no rank need walk them, nor copy the pages that they lie in
    # There are no threads to be lost: a lock that one of them held would be held in a rank for ever.
    assert len([*Path("/proc/self/task").iterdir()]) == 1
    for line in sys.stdin:
        asked = json.loads(line)
        given = zip(asked["arguments"], asked["logs"], strict=True)
        ranks = [_fork(asked["script"], arguments, log, asked["environment"]) for arguments, log in given]
        print(json.dumps(_statuses(ranks, asked["timeout"])), flush=True)


def _import() -> None:
    # ruff: noqa: F401
    import torch
    import vllm.distributed.device_communicators.cpu_communicator
    import vllm.engine.arg_utils
    import vllm.forward_context
    import vllm.model_executor.model_loader
    import vllm.model_executor.models.gpt_oss

    import jitmx.vllm
    import kept_ptx
    import simulated_card
    import vllm_world


def _fork(script: str, arguments: list[str], log: str, environment: dict[str, str]) -> int:
    rank = os.fork()
    if not rank:
        _run(script, arguments, log, environment)
    return rank


def _run(script: str, arguments: list[str], log: str, environment: dict[str, str]) -> NoReturn:
    status = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for to, of in ((0, nothing), (1, target), (2, target)):
            os.dup2(of, to)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["-c", *arguments]
        from jitmx import settings
        from kept_ptx import keeping

        settings.reload()
        with keeping():
            exec(compile(script, "<rank>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _statuses(ranks: list[int], timeout: float) -> list[int]:
    """How each ended; those that take longer are ended."""
    end, statuses = time.monotonic() + timeout, dict.fromkeys(ranks, -1)
    left = set(ranks)
    while left:
        if time.monotonic() > end:
            for rank in left:
                os.kill(rank, signal.SIGKILL)
        for rank in tuple(left):
            done, status = os.waitpid(rank, os.WNOHANG)
            if done:
                statuses[rank] = os.waitstatus_to_exitcode(status)
                left.remove(rank)
        time.sleep(0.02)
    return [statuses[rank] for rank in ranks]
