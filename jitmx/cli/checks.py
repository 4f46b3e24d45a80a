"""The checks behind `jitmx doctor`, each independent of the others."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from jitmx import arch as arches
from jitmx import resources, settings
from jitmx.cache import files, layout
from jitmx.cli import output
from jitmx.errors import ArchError, CacheError, DriverError, JitmxError, TacticError

_LEAST_FREE = 256 << 20
_MOST_SKEW = 2.0

_CUDA_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp4.h", "cuda_fp6.h", "cuda_fp8.h")

# Small, and takes every path a kernel takes: a header of the CUDA wheel, the binding, the image, its disassembly.
_PROBE = '#include <cuda_fp16.h>\nextern "C" __global__ void jitmx_doctor(__half* x) { *x = __hadd(*x, *x); }\n'


@dataclass(frozen=True)
class Check:
    """One finding: what was looked at, "ok", "note" or "problem", what was found, and what to do ("" for nothing)."""

    name: str
    status: str
    found: str
    remedy: str = ""


def run(*, gpu: bool) -> list[Check]:
    """Every check, in the order in which a kernel meets what they look at.

    Args:
        gpu: kernels are to run here, so that what running needs is a problem where it is missing.
    """
    checks: tuple[Callable[[], Iterator[Check]], ...] = (
        _data,
        _ledgers,
        _families,
        _tables,
        _headers,
        _toolchain,
        _cache,
        _site_caches,
        _keys,
        _bundles,
        _remote,
        lambda: _driver(gpu),
        lambda: _torch(gpu),
        _cupy,
    )
    found = list(_settings())
    if found[0].status == "problem":
        # Nothing else can be looked at: where to look is a setting.
        return found
    return found + [finding for check in checks for finding in check()]


def _settings() -> Iterator[Check]:
    try:
        settings.current()
    except JitmxError as error:
        yield Check("settings", "problem", str(error), "correct or unset the variable; `jitmx env` lists all")
        return
    named = [setting.name for setting in settings.table() if settings.origin(setting.field) != "default"]
    yield Check("settings", "ok", f"from the environment: {', '.join(named)}" if named else "all at their defaults")


def _data() -> Iterator[Check]:
    for name in ("templates", "tactics"):
        try:
            yield Check(name, "ok", str(resources.directory(name)))
        except JitmxError as error:
            yield Check(name, "problem", str(error), "install jitmx again, from its checkout or wheel")


def _ledgers() -> Iterator[Check]:
    """What ships as checked and what was checked on this machine, where it cannot be used."""
    from jitmx import ledger

    for path in (None, ledger.own_path()):
        try:
            ledger.load(path)
        except JitmxError as error:
            remedy = ledger.own_remedy(error) if path and isinstance(error, TacticError) else error.remedy
            # One that only another user may read is done without.
            status = "note" if isinstance(error.__cause__, PermissionError) else "problem"
            yield Check("ledger", status, error.message, remedy)


def _families() -> Iterator[Check]:
    """Whether kernel families of the user's own can be loaded, where folders of some are named."""
    folders = settings.current().families
    if not folders:
        return
    from jitmx import kernels

    try:
        known = kernels.families()
        names = [name for folder in folders for name in resources.families(folder / "kernels", folder / "templates")]
        for name in names:
            kernels.family(name)  # of a module that declares none
    except JitmxError as error:
        found, remedy = _split(error)
        yield Check("families", "problem", found, remedy or "correct it, or take its folder out of JITMX_FAMILIES")
        return
    yield Check("families", "ok", f"{', '.join(names)} of your own, beside {len(known) - len(names)}")


def _tables() -> Iterator[Check]:
    """Tuning tables of the user's own, where there are any or a folder for them is named."""
    from jitmx import kernels
    from jitmx.dispatch import tactics

    folder = settings.current().tactics_dir
    named = settings.origin("tactics_dir") != "default"
    if named and not files.is_directory(folder):
        yield Check("tables", "problem", f"{folder} is no directory that is there", "make it, or unset JITMX_TACTICS")
        return
    try:
        families = kernels.families()
    except JitmxError:  # which has been told
        return
    targets = {target.name: target for target in arches.SUPPORTED.values()}
    faults, count = [], 0
    for path in sorted((*folder.glob("*.json"), *folder.glob("*/*.json"))):
        target = targets.get(path.parent.name) if path.parent != folder else None
        if target is None or path.stem not in families:
            faults.append(Check("tables", "problem", *_unread(path, folder)))
            continue
        count, family = count + 1, families[path.stem]
        try:
            found = tactics.idle(tactics.load(path, family, target), family, target)
            faults += [Check("tables", "problem", said, f"mend the row, or take it out of {path}") for said in found]
        except JitmxError as error:
            said, remedy = _split(error)
            faults.append(Check("tables", "problem", said, remedy or f"mend or remove {path}"))
    yield from faults
    if (count or named) and not faults:
        yield Check("tables", "ok", f"{folder}: {count} of your own")


def _unread(path: Path, folder: Path) -> tuple[str, str]:
    """Of a file among tables that no call reads, why that is and what to do."""
    from jitmx import kernels

    if path.parent == folder:
        return f"{path} is of no target, so no call reads it", f"move it to {folder}/<target>/"
    name = path.parent.name
    try:
        target = arches.parse(name).name
    except ArchError:
        return f"{path} is not read: {name} is no target (targets: {', '.join(arches.SUPPORTED)})", "move it away"
    if name != target:
        return f"{path} is not read: tables of {name} are those in {target}/", f"rename the folder to {target}"
    known = ", ".join(kernels.families())
    return f"{path} is not read: {path.stem} is no family (families: {known})", "rename it or move it away"


def _headers() -> Iterator[Check]:
    from jitmx.toolchain import headers

    pool = headers.pool()
    missing = [name for name in _CUDA_HEADERS if name not in pool]
    if missing:
        found = f"missing: {', '.join(missing)}"
        yield Check("headers", "problem", found, "pip install --force-reinstall nvidia-cuda-runtime")
    else:
        yield Check("headers", "ok", ", ".join(map(str, pool.places())))


def _split(error: Exception) -> tuple[str, str]:
    """What an error found and what it says to do."""
    found, remedy = (error.message, error.remedy) if isinstance(error, JitmxError) else (str(error), "")
    return found.splitlines()[0], remedy


def _toolchain() -> Iterator[Check]:
    from jitmx.toolchain import cubin, nvrtc

    reinstall = "pip install --force-reinstall"
    try:
        identity = nvrtc.identity()
    except (JitmxError, OSError) as error:
        yield Check("NVRTC", "problem", str(error), f"{reinstall} nvidia-cuda-nvrtc")
        return
    yield Check("NVRTC", "ok", f"{identity.version}, {identity.path}")
    able, refused = [], []
    for target in arches.SUPPORTED.values():
        try:
            nvrtc.check_target(target)
            able.append(target)
        except ArchError as error:
            refused.append(error)
    yield Check("targets", "ok" if able else "problem", ", ".join(map(str, able)) or "none")
    for refusal in refused:
        yield Check("targets", "note", *_split(refusal))
    if not able:
        return
    try:
        compiled = nvrtc.compile(_PROBE, nvrtc.options(able[-1]))
    except (JitmxError, ImportError) as error:
        packages = "cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime"
        yield Check("compile", "problem", str(error), f"{reinstall} {packages}")
        return
    took = f"{compiled.milliseconds:.0f} ms"
    yield Check("compile", "ok", f"a small kernel for {able[-1]}, with CUDA's headers: {took}")
    try:
        count = len(cubin.sass(compiled.image))
    except (JitmxError, OSError) as error:
        yield Check("nvdisasm", "problem", str(error), f"{reinstall} nvidia-cuda-nvdisasm")
        return
    yield Check("nvdisasm", "ok", f"disassembles it: {count} instructions")


def _cache() -> Iterator[Check]:
    current = settings.current()
    if current.mode == "off":
        yield Check("cache", "note", "JITMX_MODE=off: every process compiles anew", "unset JITMX_MODE to keep kernels")
        return
    yield from check_directory(current.cache_dir, allow_shared=current.allow_shared_cache)


def _site_caches() -> Iterator[Check]:
    for place in settings.current().site_cache:
        if not files.exists(place):
            remedy = "put it there, or take it out of JITMX_SITE_CACHE"
            yield Check("site cache", "problem", f"{place} is not there, so nothing is found in it", remedy)


def _keys() -> Iterator[Check]:
    """Whether keys that are named can be used."""
    from jitmx.cache import bundle_layer, keys

    now = settings.current()
    try:
        trusted = bundle_layer.trusted()
        if trusted is not None:
            yield Check("bundle keys", "ok", f"{len(trusted)} from JITMX_BUNDLE_KEYS")
    except JitmxError as error:
        yield _of_key("bundle keys", "JITMX_BUNDLE_KEYS", error)
    try:
        if now.signing_key:
            keys.private_key(now.signing_key)
            yield Check("signing key", "ok", str(now.signing_key))
    except JitmxError as error:
        yield _of_key("signing key", "JITMX_SIGNING_KEY", error)


def _of_key(name: str, variable: str, error: JitmxError) -> Check:
    found, remedy = _split(error)
    return Check(name, "problem", found, f"{remedy}, or unset {variable}" if remedy else f"correct or unset {variable}")


def _bundles() -> Iterator[Check]:
    """Those that look-ups go through, where there are any."""
    from jitmx.cache import bundle, bundle_layer

    now = settings.current()
    named = [place for place in now.site_cache if files.exists(place) and not files.is_directory(place)]
    for place in [*named, *(place for _, place in bundle_layer.installed())]:
        try:
            found = bundle.open_(place, trusted=bundle_layer.trusted(), own=not now.allow_shared_cache)
            yield Check("bundle", "ok", f"{place}: {len(found.of('record'))} kernels")
        except JitmxError as error:
            yield Check("bundle", "problem", *_split(error))


def _remote() -> Iterator[Check]:
    """Whether the remote cache answers, where there is one."""
    from jitmx.cache import bundle_layer
    from jitmx.cache.answers import Answers, Unanswered

    now = settings.current()
    if now.remote_cache is None and now.remote_write:
        remedy = "name one in JITMX_REMOTE_CACHE, or unset JITMX_REMOTE_WRITE"
        yield Check("remote", "note", "JITMX_REMOTE_WRITE does nothing: no remote cache is named", remedy)
    if now.remote_cache is None or now.mode == "off":
        return
    try:
        if bundle_layer.trusted() is not None and now.remote_write and now.signing_key is None:
            said = "what is written to the remote cache must be signed, and no key signs it"
            yield Check("remote", "problem", said, "name a private key in JITMX_SIGNING_KEY")
        Answers(now.remote_cache, now.remote_timeout).read(f"{layout.VERSION}/entries/none", 1)
        yield Check("remote", "ok", f"{now.remote_cache} answers")
    except JitmxError as error:
        yield Check("remote", "problem", *_split(error))
    except Unanswered as error:
        remedy = (
            "check the URL (JITMX_REMOTE_CACHE), credentials and the network; kernels are compiled without it meanwhile"
        )
        yield Check("remote", "problem", f"{now.remote_cache}: {error}", remedy)


def check_directory(path: Path, *, allow_shared: bool, now: Callable[[], float] = time.time) -> Iterator[Check]:
    """Findings on a cache directory: is it one, is it ours, can it be written, is there space, does its clock agree.

    Args:
        allow_shared: others may write to it by the user's own word.
        now: the system's clock, in seconds since 1970.
    """
    nearest = next(folder for folder in (path, *path.absolute().parents) if files.exists(folder))
    own = "set JITMX_CACHE_DIR to a directory of your own"
    try:
        layout.check(path, allow_shared=allow_shared)
        # A file without a name: a process that is killed leaves nothing.
        with tempfile.TemporaryFile(dir=nearest) as probe:
            before = now()
            # Without times given, a file server stamps its own clock.
            os.utime(probe.fileno())
            skew = os.fstat(probe.fileno()).st_mtime - before
    except CacheError as error:
        found, remedy = _split(error)
        yield Check("cache", "problem", found, remedy)
        return
    except NotADirectoryError:
        yield Check("cache", "problem", f"{nearest} is not a directory, so {path} cannot be made", own)
        return
    except OSError as error:
        reason = f"{nearest} cannot be written ({error.strerror}), so every process compiles anew"
        yield Check("cache", "problem", reason, f"{files.remedy(error, nearest)}, or {own}")
        return
    yield Check("cache", "ok", str(path) if files.exists(path) else f"{path} (made at the first compile)")
    free = shutil.disk_usage(nearest).free
    if free < _LEAST_FREE:
        remedy = "free some, run `jitmx cache prune --size 100M`, or move the cache with JITMX_CACHE_DIR"
        yield Check("disk", "problem", f"{output.size(free)} free at {nearest}", remedy)
    else:
        yield Check("disk", "ok", f"{output.size(free)} free")
    if abs(skew) > _MOST_SKEW:
        apart = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'}"
        remedy = (
            "set both by NTP; kernels are served right all the same, but `cache ls` and `prune --age` misjudge ages"
        )
        yield Check("clock", "problem", f"the cache's file system is {apart} this machine", remedy)
    else:
        yield Check("clock", "ok", "the cache's file system and this machine agree")


def _driver(gpu: bool) -> Iterator[Check]:
    from jitmx.runtime import driver
    from jitmx.toolchain import nvrtc

    lacking = "problem" if gpu else "note"
    try:
        devices, version = driver.devices(), driver.version()
    except DriverError as error:
        yield Check("driver", lacking, *_split(error))
        return
    release = _release()
    yield Check("driver", "ok", f"CUDA {version[0]}.{version[1]}" + (f", release {release}" if release else ""))
    try:
        major = int(nvrtc.identity().version.split(".")[0])
    except (JitmxError, OSError):
        major = version[0]
    if major > version[0]:
        found = f"it runs code of CUDA {version[0]}, and the NVRTC here writes that of CUDA {major}"
        remedy = f"install a driver for CUDA {major}, or an nvidia-cuda-nvrtc of CUDA {version[0]}"
        yield Check("driver", "problem", found, remedy)
    if not devices:
        yield Check("GPU", lacking, "none is visible", "to run kernels, check nvidia-smi and CUDA_VISIBLE_DEVICES")
    for device in devices:
        capability = f"compute capability {device.major}.{device.minor}, {device.multiprocessors} SMs"
        text = f"{device.index}: {device.name}, {capability}"
        try:
            yield Check("GPU", "ok", f"{text}, target {arches.of_device(device.major, device.minor)}")
        except ArchError as error:
            yield Check("GPU", lacking, text, str(error))


def _release() -> str | None:
    """Release of the loaded kernel module, "580.95.05"; None where it does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else None


def _torch(gpu: bool) -> Iterator[Check]:
    lacking = "problem" if gpu else "note"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Check("torch", lacking, "not installed; the operators need it", "pip install 'jitmx[torch]'")
        return
    cuda = _torch_cuda()
    if cuda is None:
        remedy = "to run kernels install a CUDA build of torch"
        yield Check("torch", lacking, f"{version}, a build without CUDA", remedy)
        return
    yield Check("torch", "ok", f"{version}, CUDA {cuda}")


def _torch_cuda() -> str | None:
    """CUDA release of the torch at hand, None for a CPU build; from its version file, as importing it takes seconds."""
    try:
        spec = util.find_spec("torch")
    except (ImportError, ValueError):  # what is left of one that was taken away
        spec = None
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"""^cuda\b[^=]*=\s*['"]([\d.]+)['"]""", text, re.MULTILINE)
    return match[1] if match else None


def _cupy() -> Iterator[Check]:
    names = {str(item.metadata["Name"]).lower() for item in metadata.distributions()}
    wheels = sorted(name for name in names if re.fullmatch(r"cupy(-cuda\w+)?", name))
    if not wheels:
        yield Check("CuPy", "problem", "not installed", "pip install cupy-cuda13x")
    elif len(wheels) > 1:
        yield Check(
            "CuPy", "problem", f"{' and '.join(wheels)} overwrite one another",
            f"pip uninstall -y {' '.join(wheels)} && pip install cupy-cuda13x",
        )  # fmt: skip
    else:
        yield Check("CuPy", "ok", f"{wheels[0]} {metadata.version(wheels[0])}")
