"""Files of a remote cache, by fsspec: bounded in time and size, and done without while nothing answers.

Each answer is waited for in a thread of its own, for file systems can hang for ever (a mount whose server is gone), and
what they do then cannot be interrupted. Once something has failed, nothing is asked for a while, which doubles each
time, and of a URL that no driver opens never again. fsspec and its drivers are imported with the first question.
"""

from __future__ import annotations

import errno
import logging
import os
import posixpath
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

logger = logging.getLogger("jitmx.cache")

_T = TypeVar("_T")
_TAKEN = ("PreconditionFailed", "ConditionalRequestConflict")
_FIRST, _MOST = 15.0, 600.0  # seconds for which nothing is asked: at first, and at most


class Unanswered(Exception):
    """The remote cache gave no answer, or is not asked for now; the message says why."""


class _Unopenable(Exception):
    """No driver opens such a URL, which no later question changes."""


class Circuit:
    """Whether to ask: after each failure not for a while, and then once, to see.

    Args:
        name: what fails, in words, for the one warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)
        self._pause, self._until = 0.0, 0.0
        self._probing = False
        self._said = False

    def closed(self) -> bool:
        """Whether to ask now. Where that is to see whether it answers again, only one caller is told to."""
        with self._lock:
            if not self._pause:
                return True
            if time.monotonic() < self._until:
                return False
            self._until = time.monotonic() + self._pause
            self._probing = True
            return True

    def answered(self) -> None:
        """It works: ask on."""
        with self._lock:
            if self._pause:
                logger.info("%s again", self._name)
            self._pause, self._probing = 0.0, False

    def failed(self, why: str) -> None:
        """It does not work: warn once, and pause."""
        with self._lock:
            if self._pause and not self._probing:
                return  # it was asked before another caller found out
            self._pause = min(2 * self._pause, _MOST) if self._pause else _FIRST
            self._probing = False
            self._until = time.monotonic() + self._pause
            said, self._said = self._said, True
        log = logger.info if said else logger.warning
        log("%s does not work (%s); going on without, and trying again after %.0f s", self._name, why, self._pause)

    def _renew(self) -> None:
        # A thread of the parent that held it does not exist in a forked child.
        self._lock = threading.Lock()


class Answers:
    """Files below a URL.

    Args:
        url: of their folder, as fsspec takes it.
        timeout: seconds to wait for each answer.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._reading, self._writing = Circuit(f"reading the remote cache {url}"), Circuit(f"writing to {url}")
        self._opened: tuple[int, Any, str] | None = None
        self._hopeless: str | None = None

    def read(self, path: str, limit: int) -> bytes | None:
        """The contents of a file, of which no more than one byte beyond `limit` is fetched; None where there is none.

        Raises:
            Unanswered: it cannot be told.
        """

        def read() -> bytes | None:
            files, root = self._files()
            place = posixpath.join(root, path)
            try:
                if _speaks(files, "http"):
                    return _streamed(files, place, limit + 1)
                found: bytes = files.cat_file(place, start=0, end=limit + 1)
                return found
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return None
            except OSError as error:
                # An empty file has no first byte to ask a server for.
                if error.errno == errno.EINVAL:
                    return b""
                raise

        return self._ask(self._reading, read)

    def write(self, path: str, data: bytes) -> None:
        """Put `data` there, whole where the file system can; raises as `read`."""

        def write() -> None:
            files, root = self._files()
            target = posixpath.join(root, path)
            if not _speaks(files, "file"):
                files.pipe_file(target, data)
                return
            # Local files are the only ones that appear before they are whole.
            aside = posixpath.join(posixpath.dirname(target), f".{os.getpid()}-{os.urandom(6).hex()}.tmp")
            files.makedirs(posixpath.dirname(target), exist_ok=True)
            files.pipe_file(aside, data)
            files.mv(aside, target)

        self._ask(self._writing, write)

    def create(self, path: str, data: bytes) -> bool:
        """Put `data` there if nothing is there, which one of all callers does; whether this one has.

        Of file systems without an exclusive create more than one may. Raises as `read`.
        """

        def create() -> bool:
            files, root = self._files()
            target = posixpath.join(root, path)
            try:
                if _speaks(files, "file"):
                    files.makedirs(posixpath.dirname(target), exist_ok=True)
                    with files.open(target, "xb") as stream:
                        stream.write(data)
                else:
                    files.pipe_file(target, data, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError):
                return True  # the driver has no exclusive create
            except OSError as error:
                if _is_conflict(error):
                    return False
                raise
            return True

        return self._ask(self._writing, create)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there; raises as `read`."""

        def remove() -> None:
            files, root = self._files()
            with suppress(FileNotFoundError):
                files.rm_file(posixpath.join(root, path))

        self._ask(self._writing, remove)

    def _files(self) -> tuple[Any, str]:
        """The file system, and where the folder is in it."""
        # Those that run an event loop cannot be used in a forked child.
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                import fsspec

                files, root = fsspec.core.url_to_fs(self.url)
            except (ImportError, ValueError) as error:
                raise _Unopenable(_words(error)) from error
            self._opened = os.getpid(), files, root
        return self._opened[1:]

    def _ask(self, circuit: Circuit, question: Callable[[], _T]) -> _T:
        if self._hopeless is not None:
            raise Unanswered(self._hopeless)
        if not circuit.closed():
            raise Unanswered("it is not asked for now")
        answer: list[_T] = []
        failure: list[BaseException] = []

        def ask() -> None:
            try:
                answer.append(question())
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=ask, name="jitmx-remote", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter ends
            raise Unanswered from error
        thread.join(self._timeout)
        if answer:
            circuit.answered()
            return answer[0]
        if failure and isinstance(failure[0], _Unopenable):
            self._give_up(str(failure[0]))
            raise Unanswered(str(failure[0]))
        why = _words(failure[0]) if failure else f"no answer within {self._timeout:g} s"
        circuit.failed(why)
        raise Unanswered(why)

    def _give_up(self, why: str) -> None:
        """Warn once, and never ask again."""
        said, self._hopeless = self._hopeless is not None, why
        if not said:
            logger.warning(
                "the remote cache %s cannot be opened (%s); going on without: correct or unset JITMX_REMOTE_CACHE",
                self.url, why,
            )  # fmt: skip


def _speaks(files: Any, protocol: str) -> bool:
    return protocol in ([files.protocol] if isinstance(files.protocol, str) else files.protocol)


def _streamed(files: Any, place: str, most: int) -> bytes:
    """The first bytes of a file: a web server may send all of it, or more, whatever part is asked for."""
    parts = []
    with files.open(place, "rb", block_size=0, size=1) as stream:  # as a stream, and without asking for the size
        while most > 0 and (part := stream.read(most)):
            parts.append(part)
            most -= len(part)
    return b"".join(parts)


def _is_conflict(error: OSError) -> bool:
    """Whether S3 says that the name is taken, or being taken by somebody else."""
    said = getattr(error.__cause__, "response", None)
    return isinstance(said, dict) and said.get("Error", {}).get("Code") in _TAKEN


def _words(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return f"{error}; pip install 'jitmx[remote]', and the driver that fsspec names"
    return f"{type(error).__name__}: {error}".split("\n")[0][:300]
