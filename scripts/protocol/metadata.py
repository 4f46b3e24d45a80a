"""What a figure depends on: card, driver, clocks, software, environment, model.

Every field is `{"value": …}` or `{"value": null, "reason": …}`: what could not be read is said, never guessed. No name
of a host, user or home folder is kept.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata as packages
from pathlib import Path
from typing import Any

from jitmx.errors import JitmxError

Field = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
# Variables that steer what is measured; whatever looks like a secret is left out.
_PREFIXES = (
    "JITMX_", "VLLM_", "FLASHINFER_", "CUDA_", "CUPY_", "TORCH", "PYTORCH_", "TRITON_", "NCCL_", "NVIDIA_", "OMP_",
    "MKL_", "HF_HUB_OFFLINE",
)  # fmt: skip
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_?KEY|_KEY$")
_SMI = (
    "name", "compute_cap", "driver_version", "vbios_version", "memory.total", "memory.used", "power.limit",
    "power.default_limit", "power.max_limit", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem",
    "clocks.applications.graphics", "clocks.applications.memory", "clocks_event_reasons.active", "temperature.gpu",
    "persistence_mode", "ecc.mode.current", "mig.mode.current", "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip
# What is imported to ask for versions; each may be missing.
_PACKAGES = (
    "jitmx", "vllm", "torch", "triton", "transformers", "safetensors", "cupy-cuda13x", "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cublas", "flashinfer-python", "humming-kernels", "numpy",
)  # fmt: skip


class Unknown(Exception):
    """Why a field could not be read, in words."""


def collect(
    model: Path | None = None, *, whole: bool = False, about: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that can be read here and now.

    Args:
        model: a checkpoint, whose digests are added.
        whole: read every byte of its weights for a digest, not only names, shapes and sizes.
        about: flags and workload of a run, kept as they are.
    """
    return {
        "taken": field(lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")),
        "gpus": field(_gpus),
        "clocks": field(_clocks),
        "driver": field(_driver),
        "cuda": field(_cuda),
        "cudnn": field(_cudnn),
        "nvrtc": field(_nvrtc),
        "cpu": field(_cpu),
        "memory_bytes": field(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "os": field(lambda: [platform.system(), platform.release(), platform.machine()]),
        "container": field(_container),
        "python": field(lambda: sys.version.split()[0]),
        "packages": {name: field(lambda name=name: _version(name)) for name in _PACKAGES},  # type: ignore[misc]
        "pip_freeze": field(_freeze),
        "git": {"jitmx": field(lambda: _git(ROOT)), "vllm": field(_vllm_revision)},
        "environment": field(lambda: environment(os.environ)),
        "model": field(lambda: digest_of(model, whole=whole)),
        "about": dict(about or {}),
    }


def field(read: Callable[[], Any]) -> Field:
    """What `read` gives, or why it gives nothing."""
    try:
        return {"value": read()}
    except (Unknown, JitmxError) as why:
        return {"value": None, "reason": str(why)}
    except (OSError, ImportError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        return {"value": None, "reason": f"{type(error).__name__}: {error}"}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that steer what is measured, without secrets and with the home folder as `~`."""
    home = str(Path.home())
    return {
        name: value.replace(home, "~") if len(home) > 1 else value
        for name, value in sorted(variables.items())
        if name.startswith(_PREFIXES) and not _SECRET.search(name)
    }


def digest_of(model: Path | None, *, whole: bool = False) -> dict[str, Any]:
    """Digests of a checkpoint: of its configuration, and of what its weight files say they hold.

    Raises:
        Unknown: no model, or no checkpoint there.
    """
    if model is None:
        raise Unknown("no model was given")
    files = sorted(model.glob("*.safetensors"))
    if not files or not (model / "config.json").is_file():
        raise Unknown(f"{model.name} holds no config.json and *.safetensors")
    heads = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            heads.update(f"{file.name}:{file.stat().st_size}:".encode() + stream.read(length))
    found = {
        "name": model.name,
        "config_sha256": hashlib.sha256((model / "config.json").read_bytes()).hexdigest(),
        "headers_sha256": heads.hexdigest(),
        "bytes": sum(file.stat().st_size for file in files),
    }
    if whole:
        content = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                content.update(hashlib.file_digest(stream, "sha256").digest())
        found["weights_sha256"] = content.hexdigest()
    return found


def _say(command: list[str], timeout: float = 20) -> str:
    """What a command prints.

    Raises:
        Unknown: it is not there, failed, or took too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise Unknown(f"{command[0]} is not on PATH") from None
    except subprocess.TimeoutExpired:
        raise Unknown(f"{command[0]} did not answer in {timeout:.0f} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise Unknown(f"{command[0]} ended with status {done.returncode} and said: {said[0]}")
    return done.stdout


def _gpus() -> list[dict[str, str | None]]:
    said = _say(["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]
    if not rows:
        raise Unknown("nvidia-smi lists no GPU")
    missing = ("[N/A]", "[Not Supported]", "N/A")
    return [{name: None if value in missing else value for name, value in zip(_SMI, row, strict=True)} for row in rows]


def _clocks() -> list[str]:
    """Why clocks are what they are, as the driver says it, a line a card."""
    said = _say(["nvidia-smi", "-q", "-d", "CLOCK,PERFORMANCE"])
    kept = re.compile(r"Applications|Locked|Clocks Event Reasons|SW Power Cap|HW Slowdown|Clocks Throttle")
    lines = [re.sub(r"\s+", " ", line).strip() for line in said.splitlines() if kept.search(line)]
    if not lines:
        raise Unknown("nvidia-smi -q says nothing of clocks")
    return lines


def _driver() -> dict[str, Any]:
    from jitmx.runtime import driver

    return {"cuda": list(driver.version()), "devices": [device.name for device in driver.devices()]}


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        raise Unknown("torch here is built without CUDA")
    return str(torch.version.cuda)


def _cudnn() -> int:
    import torch

    found = torch.backends.cudnn.version()
    if found is None:
        raise Unknown("torch here has no cuDNN")
    return int(found)


def _nvrtc() -> dict[str, Any]:
    from jitmx.toolchain import nvrtc

    found = nvrtc.identity()
    return {"release": found.version, "sha256": found.digest}


def _cpu() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return {"model": names[0] if names else None, "cores": len(os.sched_getaffinity(0))}


def _container() -> str:
    image = os.environ.get("CONTAINER_IMAGE")
    if image:
        return image
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        raise Unknown("in a container that does not say its image; pass its digest in CONTAINER_IMAGE")
    raise Unknown("not in a container, as far as can be seen")


def _version(name: str) -> str:
    try:
        return packages.version(name)
    except packages.PackageNotFoundError:
        raise Unknown("not installed") from None


def _freeze() -> list[str]:
    return sorted({f"{found.metadata['Name']}=={found.version}" for found in packages.distributions()}, key=str.lower)


def _git(folder: Path) -> dict[str, Any]:
    revision = _say(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip()
    changed = _say(["git", "-C", str(folder), "status", "--porcelain"]).splitlines()
    return {"revision": revision, "dirty": bool(changed)}


def _vllm_revision() -> str:
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Unknown("vllm is not installed")
    found = re.search(r"commit_id = '(\w+)'", Path(spec.origin).with_name("_version.py").read_text())
    if found is None:
        raise Unknown("vllm does not say which commit it was built from")
    return found[1]
