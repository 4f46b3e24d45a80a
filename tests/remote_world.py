"""A real S3 server in a process of its own, and a way to it that can be cut."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

KEYS = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}

# Forwards connections to a port until it is killed, which ends them wherever they are.
_FORWARD = """
import socket, sys, threading
def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
def serve(client):
    try:
        server = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
    except OSError:
        client.close()
        return
    threading.Thread(target=copy, args=(client, server), daemon=True).start()
    copy(server, client)
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])), reuse_port=True)
while True:
    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_server(port: int) -> subprocess.Popen[bytes]:
    """moto's S3 server, which answers as soon as this returns; it keeps everything in memory."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | KEYS)
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return server
        except OSError:
            assert server.poll() is None and time.monotonic() < deadline, "moto's server does not start"
            time.sleep(0.05)


def start_way(port: int, to: int) -> subprocess.Popen[bytes]:
    """A process that forwards connections from one port to another."""
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", _FORWARD, str(port), str(to)], stderr=subprocess.DEVNULL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and wait for its end."""
    process.kill()
    process.wait()


def variables(port: int) -> dict[str, str]:
    """What makes fsspec find the server."""
    return {**KEYS, "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def server() -> Iterator[int]:
    """An S3 server with the bucket `kernels`; its port."""
    port = free_port()
    process = start_server(port)
    try:
        make_bucket(port)
        yield port
    finally:
        stop(process)


def make_bucket(port: int) -> None:
    """Make the bucket `kernels`."""
    with socket.create_connection(("127.0.0.1", port)) as stream:
        stream.sendall(b"PUT /kernels HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        assert b" 200 " in stream.recv(4096).split(b"\r\n")[0]
