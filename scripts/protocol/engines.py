"""Engines and servers of one configuration, each in a process of its own with its own log."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.protocol import worker
from scripts.protocol.configurations import ATTENTION_SAID, Configuration
from scripts.protocol.report import ProtocolError

ROOT = Path(__file__).resolve().parents[2]
_TAIL = 20


@dataclass(frozen=True)
class Place:
    """What the engines of one level share.

    Attributes:
        model: folder of the checkpoint.
        out: folder for logs and what tasks write.
        options: arguments of every engine, over `DEFAULTS`.
        timeout: seconds that one engine may take, its start included.
    """

    model: Path
    out: Path
    options: dict[str, Any]
    timeout: float

    def engine(self, configuration: Configuration) -> dict[str, Any]:
        """Arguments of an engine; the configuration's own win.

        A backend of attention is for engines whose attention is vLLM's: the plugin would leave jitmx's for it.
        """
        options = {"model": str(self.model), **DEFAULTS, **self.options, **configuration.engine()}
        if configuration.attends:
            options.pop("attention_backend", None)
            if "attention_config" in options:
                said = options["attention_config"].items()
                options["attention_config"] = {name: value for name, value in said if not name.startswith("backend")}
        return options


# A batch of 64 and 16k tokens of context; graphs for the batches that are measured, no reuse of prefixes between runs.
DEFAULTS: dict[str, Any] = {
    "max_model_len": 16384,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": False,
    "seed": 0,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
}
# What vLLM and jitmx log of a start, in seconds: reading and packing weights; what comes after, with compilation in it.
_PHASES = {
    "loading_s": re.compile(r"Model loading took \S+ GiB memory and ([\d.]+) seconds"),
    "warmup_s": re.compile(r"init engine \(.*?\) took ([\d.]+) s"),
    "compilation_s": re.compile(r"init engine \(.*?\) took [\d.]+ s \(compilation: ([\d.]+) s\)"),
}
_KERNELS = re.compile(r"jitmx: \d+ kernels for \S+ are ready after ([\d.]+) s, (\d+) of them compiled now")
# Servers are on this machine, whatever proxy the environment names.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Logits as they are, of the whole vocabulary, and token numbers in and out.
_OFFLINE = {"skip_tokenizer_init": True, "max_logprobs": -1, "logprobs_mode": "raw_logits"}


def run(place: Place, configuration: Configuration, tasks: list[dict[str, Any]], label: str = "") -> dict[str, Any]:
    """Results of `tasks`, each under its own name, from one fresh engine; "startup" has figures of its start.

    Raises:
        ProtocolError: the engine failed or ran out of time; the message has the end of its log.
    """
    with running(place, configuration, tasks, label) as result:
        return result()


@contextlib.contextmanager
def running(
    place: Place, configuration: Configuration, tasks: list[dict[str, Any]], label: str = ""
) -> Iterator[Callable[[], dict[str, Any]]]:
    """An engine at work: what is yielded waits for it and gives what `run` gives. On the way out it is ended."""
    asked = {"engine": "vllm", "options": place.engine(configuration) | _OFFLINE, "tasks": tasks}
    name = f"{configuration.name}{label}"
    with _working(place, name, asked, _environment(configuration) | worker.ALONE) as answer:

        def result() -> dict[str, Any]:
            found = answer()
            took = {"startup_s": found["startup_s"], "plugins_s": found["plugins_s"]}
            return found | {"startup": took | startup((place.out / f"{name}.log").read_text(errors="replace"))}

        yield result


@contextlib.contextmanager
def each(
    place: Place,
    configurations: Sequence[Configuration],
    tasks: Callable[[str], list[dict[str, Any]]],
    *,
    together: bool,
) -> Iterator[Iterator[tuple[Configuration, dict[str, Any]]]]:
    """Every configuration in turn, and what `run` gives for it. On the way out all engines are ended.

    Args:
        tasks: those of a configuration, by its name.
        together: start the engines at once; they share the card. Else each starts when the one before has ended.
    """
    with contextlib.ExitStack() as stack:
        results = [
            stack.enter_context(running(place, item, tasks(item.name)))
            if together
            else functools.partial(run, place, item, tasks(item.name))
            for item in configurations
        ]
        yield ((item, result()) for item, result in zip(configurations, results, strict=True))


def reference(place: Place, tasks: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Results of `tasks` from transformers in float32 on `device`.

    Raises:
        ProtocolError: as `run`.
    """
    asked = {"engine": "transformers", "options": {"model": str(place.model), "device": device}, "tasks": tasks}
    with _working(place, "transformers", asked, _environment(Configuration())) as answer:
        return answer()


@contextlib.contextmanager
def _working(
    place: Place, name: str, asked: dict[str, Any], environment: dict[str, str]
) -> Iterator[Callable[[], dict[str, Any]]]:
    place.out.mkdir(parents=True, exist_ok=True)
    question, answer, log = (place.out / f"{name}.{end}" for end in ("asked.json", "answer.json", "log"))
    question.write_text(json.dumps(asked))
    answer.unlink(missing_ok=True)
    with started([sys.executable, "-m", worker.__name__, str(question), str(answer)], environment, log) as process:

        def wait() -> dict[str, Any]:
            try:
                process.wait(place.timeout)
            except subprocess.TimeoutExpired:
                raise ProtocolError(f"{name}: not done in {place.timeout:.0f} s; {tail(log)}") from None
            if process.returncode or not answer.is_file():
                raise ProtocolError(f"{name}: the engine ended with status {process.returncode}; {tail(log)}")
            found: dict[str, Any] = json.loads(answer.read_text())
            return found

        yield wait


@contextlib.contextmanager
def started(
    command: list[str], environment: dict[str, str], log: Path, *, cwd: Path | None = None, stdout: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own; on the way out whatever is left of the group is killed.

    Args:
        log: gets its stderr, and its stdout too where `stdout` names no file for that.
    """
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("wb"))
        apart = sink if stdout is None else stack.enter_context(stdout.open("wb"))
        process = subprocess.Popen(
            command, env=environment, stdout=apart, stderr=sink, stdin=subprocess.DEVNULL, start_new_session=True,
            cwd=cwd,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def startup(log: str) -> dict[str, Any]:
    """What an engine's log says of its start: seconds of each phase, None where it says nothing.

    `kernels_s` and `compiled` are jitmx's: seconds until its kernels were ready, and how many had to be compiled.
    `attention` is who serves it.
    """
    found: dict[str, Any] = {}
    for name, pattern in _PHASES.items():
        said = pattern.search(log)
        found[name] = float(said[1]) if said else None
    ready = _KERNELS.findall(log)
    found["kernels_s"] = round(sum(float(seconds) for seconds, _ in ready), 3)
    found["compiled"] = sum(int(count) for _, count in ready)
    ours = [said in log for said in ATTENTION_SAID]
    found["attention"] = "jitmx" if all(ours) else "jitmx and vLLM" if any(ours) else "vLLM"
    return found


def vocabulary(model: Path) -> int:
    """Tokens of a checkpoint's vocabulary.

    Raises:
        ProtocolError: there is no checkpoint.
    """
    try:
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ProtocolError(f"{model} has no config.json with a vocab_size ({error}); name a checkpoint") from None


def tail(log: Path) -> str:
    """The end of a log, for an error."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL:]
    return "\n  ".join([f"the end of {log}:", *lines])


def with_checkout(over: Mapping[str, str], base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables `over` those of `base` or this process, with this checkout first on Python's path."""
    found = {**(os.environ if base is None else base), **over}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH", "")]))
    return found


def _environment(configuration: Configuration) -> dict[str, str]:
    return with_checkout(worker.ENVIRONMENT, configuration.environment())


class Server:
    """A `vllm serve` of this machine.

    Attributes:
        base: its address, without a path.
        log: what it prints.
        ready_s: seconds until it answered.
    """

    def __init__(self, base: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.base, self._process, self.log = base, process, log
        self.ready_s = 0.0

    def healthy(self) -> bool:
        """Whether the server answers."""
        try:
            with _OPENER.open(f"{self.base}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """Exactly `tokens` greedy tokens after a prompt.

        Raises:
            ProtocolError: the server refused, failed, or gave another number of tokens.
        """
        asked = {
            "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        answer = self._post("/v1/completions", asked)
        try:
            found: list[int] = answer["choices"][0]["token_ids"]
        except LookupError as error:
            raise ProtocolError(f"no completion came: {error!r}; {tail(self.log)}") from None
        if found is None or len(found) != tokens:
            raise ProtocolError(f"{tokens} tokens were asked for; the server gave {found!r}")
        return found

    def on_workers(self, method: str) -> None:
        """Call a method of every worker's extension; the server's environment has VLLM_SERVER_DEV_MODE=1 for that.

        Raises:
            ProtocolError: the server refused or failed.
        """
        self._post("/collective_rpc", {"method": method})

    def _post(self, path: str, asked: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self.base}{path}", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        try:
            with _OPENER.open(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ProtocolError(f"the server answered {error.code}: {error.read()[:500]!r}") from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ProtocolError(f"{path} gave no answer: {error!r}; {tail(self.log)}") from None

    def stop(self, patience: float = 60) -> int | None:
        """Ask the server to end; its exit status, or None where it would not in `patience` seconds."""
        self._process.terminate()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def serving(place: Place, configuration: Configuration, **environment: str) -> Iterator[Server]:
    """A server on a free port, once it answers. On the way out it is ended.

    Raises:
        ProtocolError: it ended before it answered, or ran out of time; the message has the end of its log.
    """
    place.out.mkdir(parents=True, exist_ok=True)
    log = place.out / f"{configuration.name}.server.log"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = place.engine(configuration)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", options.pop("model")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model", *flags(options)]
    begun = time.monotonic()
    with started(command, _environment(configuration) | environment, log) as process:
        server = Server(f"http://127.0.0.1:{port}", process, log)
        while not server.healthy():
            if process.poll() is not None:
                raise ProtocolError(
                    f"{configuration.name}: the server ended with status {process.returncode} before it answered; "
                    f"{tail(log)}"
                )
            if time.monotonic() - begun > place.timeout:
                raise ProtocolError(f"{configuration.name}: no answer in {place.timeout:.0f} s; {tail(log)}")
            time.sleep(0.2)
        server.ready_s = time.monotonic() - begun
        yield server


def flags(options: dict[str, Any]) -> list[str]:
    """Arguments of an engine as options of `vllm serve`."""
    words: list[str] = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words
