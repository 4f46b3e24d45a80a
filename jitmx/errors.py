"""Every error that jitmx raises on purpose.

JitmxError
├── SettingError            a JITMX_* variable, or an alias of one, holds a value outside its choices
├── ArchError               an SM target that jitmx or this NVRTC cannot build for
├── KnobError               a variant that its family or its chip rules out
├── RenderError             a template that does not render
├── ToolchainError          NVRTC, its headers or nvdisasm cannot be used
│   └── CompileError        NVRTC refused the rendered source
├── ContractError           machine code that breaks what its kernel promises
├── CacheError              a cache directory that must not be used
├── BundleError             a bundle that is damaged, or is none
│   └── SignatureError      a bundle that no trusted key has signed
├── TacticError             a tuning table that cannot be read or has no legal row
├── InputError              tensors that a kernel cannot take
├── NotWarmedError          a kernel is missing while JITMX_MODE=required
├── CaptureError            compiling or loading was asked for during CUDA-graph capture
├── SimulationError         the PTX simulator met a fault of the kernel, or an instruction that it does not know
├── WorkerError             a worker process was ended from outside
└── DriverError             the CUDA driver is missing or refused a call

A message names the value and the rule that it breaks, a remedy what to do about it. Code decides by types and fields,
never by texts.
"""

from __future__ import annotations


class JitmxError(Exception):
    """Base of every error that jitmx raises on purpose. Its text is the message, and behind a semicolon the remedy.

    Attributes:
        message: the value and the rule that it breaks.
        remedy: what to do about it, or empty.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(*filter(None, (message, remedy)))  # both are in its repr
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class SettingError(JitmxError, ValueError):
    """An environment variable holds a value outside its choices."""


class ArchError(JitmxError, ValueError):
    """An SM target that jitmx, or the NVRTC in use, cannot build for."""


class KnobError(JitmxError, ValueError):
    """A variant that its family or its chip rules out."""


class RenderError(JitmxError):
    """A template that does not render."""


class ToolchainError(JitmxError, RuntimeError):
    """NVRTC, its headers or nvdisasm cannot be used."""


class CompileError(ToolchainError):
    """NVRTC refused the rendered source.

    Attributes:
        log: what NVRTC printed.
        source_path: where the rendered source was kept, or None where nothing could be written.
    """

    def __init__(self, message: str, remedy: str = "", *, log: str = "", source_path: str | None = None) -> None:
        super().__init__(message, remedy)
        self.log = log
        self.source_path = source_path


class ContractError(JitmxError):
    """Machine code that breaks what its kernel promises."""


class CacheError(JitmxError, RuntimeError):
    """A cache directory that must not be used."""


class BundleError(JitmxError, ValueError):
    """A bundle of kernels that is damaged, or something else in its place."""


class SignatureError(BundleError):
    """A bundle that none of the trusted keys has signed, or a signature that cannot be checked."""


class TacticError(JitmxError, ValueError):
    """A tuning table that cannot be read or has no legal row."""


class InputError(JitmxError, ValueError):
    """Tensors that a kernel cannot take."""


class NotWarmedError(JitmxError, RuntimeError):
    """A kernel is missing from the cache while JITMX_MODE=required forbids compiling it."""


class CaptureError(JitmxError, RuntimeError):
    """Compiling or loading was asked for while a CUDA graph was being captured."""


class SimulationError(JitmxError):
    """A simulated kernel did what no kernel may, or holds an instruction that the simulator does not know."""


class WorkerError(JitmxError, RuntimeError):
    """A worker process was ended from outside, and what it was doing is lost."""


class DriverError(JitmxError, RuntimeError):
    """The CUDA driver is missing or refused a call."""
