"""The releases of vLLM that the plugin was written for and is tested with."""

from __future__ import annotations

from importlib import metadata

SUPPORTED = ">=0.33,<0.34"


def refusal(version: str | None = None) -> str | None:
    """Why the plugin is disabled with a release of vLLM, or None where it serves.

    Args:
        version: of vLLM; by default the one that is installed.
    """
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    if version is None:
        try:
            version = metadata.version("vllm")
        except metadata.PackageNotFoundError:
            return "vLLM is not an installed package, so its version is not known"
    try:
        served = SpecifierSet(SUPPORTED).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return f"vLLM's version {version!r} cannot be read; this jitmx is for vllm{SUPPORTED}"
    return None if served else f"vLLM {version} is not one of vllm{SUPPORTED}, which this jitmx is for"
