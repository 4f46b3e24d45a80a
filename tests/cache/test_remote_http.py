"""A remote cache behind a web server: entries are read, and no more of an answer than an entry can have."""

from __future__ import annotations

import gzip
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jitmx.cache import remote
from jitmx.cache.answers import Answers, Unanswered
from jitmx.cache.bundle import Kernel
from jitmx.cache.manifest import Record, Scan
from jitmx.cache.remote import Remote

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

Make = Callable[..., tuple[Record, bytes, str]]


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder; it knows no ranges, as many do."""

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/kernels"
        finally:
            server.shutdown()
            thread.join()


def test_what_lies_in_a_folder_is_served_to_others(
    tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MOST_ENTRY", 1 << 20)
    kernel, scan = Kernel(*make("a")), Scan("c" * 64, "d" * 64, {"x.h": "e" * 64})
    folder = tmp_path / "kernels"
    writer = Remote(f"file://{folder}", timeout=5, trusted=None, writes=True)
    writer.put(kernel)
    writer.put_scan(scan)
    (other,) = (folder / "v1/entries").glob("*/*")
    with served(partial(Quiet, directory=tmp_path)) as url:
        reader = Remote(url, timeout=60, trusted=None, writes=False)
        assert reader.entry(kernel.record.key) == kernel and reader.scan(scan.digest) == scan
        assert reader.entry("f" * 64) is None and reader.scan("f" * 64) is None
        assert not caplog.records
        other.write_bytes(b"")
        assert reader.entry(kernel.record.key) is None
        assert "taken for absent" in caplog.text
        other.write_bytes(bytes(2 << 20))
        assert Remote(url, timeout=60, trusted=None, writes=False).entry(kernel.record.key) is None
        assert "is larger than such a file can be (1048576 bytes)" in caplog.text


def answering(send: Callable[[BaseHTTPRequestHandler], None]) -> type[BaseHTTPRequestHandler]:
    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            send(self)

    return Answer


@pytest.mark.parametrize("packed", [False, True])
def test_of_an_answer_that_never_ends_no_more_is_taken_than_was_asked_for(packed: bool) -> None:
    sent, left = [0], threading.Event()
    block = gzip.compress(bytes(1 << 20)) if packed else bytes(1 << 20)

    def send(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        if packed:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        try:
            for _ in range(4000 if packed else 400):
                request.wfile.write(block)
                sent[0] += 1
        except OSError:
            pass
        left.set()

    with served(answering(send)) as url:
        found = Answers(url, 60).read("v1/entries/aa/a.jitmx", 1000)
        assert found == bytes(1001)
        assert left.wait(60) and (packed or sent[0] < 100)


@pytest.mark.parametrize("status", [403, 500])
def test_a_server_that_refuses_is_one_that_does_not_answer(status: int, caplog: pytest.LogCaptureFixture) -> None:
    with served(answering(lambda request: request.send_error(status))) as url:
        reader = Answers(url, 60)
        for _ in range(2):
            with pytest.raises(Unanswered):
                reader.read("v1/entries/aa/a.jitmx", 1000)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"reading the remote cache {url} does not work" in said and str(status) in said
