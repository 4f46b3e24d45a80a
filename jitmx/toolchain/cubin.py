"""What is in a cubin: target, kernels, registers, memory, and the machine code in words.

Resource use is read from the ELF file itself, so that it is known where none of NVIDIA's tools are installed. The
attribute codes below are those that `cuobjdump -elf` spells out; each figure agrees with what
`cuobjdump --dump-resource-usage` and `ptxas -v` print.
"""

from __future__ import annotations

import itertools
import os
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jitmx.errors import ToolchainError
from jitmx.toolchain import elf, wheels

_EM_CUDA = 190
_ABI = 8
_STO_ENTRY = 0x10
_INSTRUCTION = struct.Struct("<QQ")
_PAIR = struct.Struct("<II")
_TRIPLE = struct.Struct("<III")
# The stack of a kernel that calls a function which calls itself.
_UNBOUNDED = 0xFFFFFFFF

# .nv.info: one byte of format, one of attribute, two of value or size.
_ATTRIBUTE = struct.Struct("<BBH")
_FORMAT_SIZED = 4
_MAX_THREADS = 0x05
_REQUIRED_THREADS = 0x10
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_REGCOUNT = 0x2F
_ANNOTATIONS = 0x55
_SPILL_REFILL = 1

# Opcode (12 bits) of a store to local memory; bits 73..75 say how wide it is.
_STL = 0x387
_WIDTH = (1, 1, 2, 2, 4, 8, 16, 16)

# From compute capability 9.0 on, the system's share of a block's shared memory is part of the section.
_RESERVED_SHARED = 1024

_NOTE_TOOL = 2000
_COMMAND = re.compile(rb"-arch (sm_\d+[af]?)\b")
_NVDISASM_SECONDS = 120
_LISTED = re.compile(r"^[ \t]*/\*[0-9a-f]{4,}\*/[ \t]+([^;\n]*[^;\s])", re.MULTILINE)


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes. Bytes of stack, spills and local memory are for each thread, of shared memory each block.

    Attributes:
        name: the symbol to launch.
        registers: registers a thread.
        stack_bytes: stack frame with those of the functions it calls: local arrays, spilled registers, call frames.
            Recursion has no bound; there it is the kernel's own frame.
        spill_bytes: bytes stored to the stack for lack of registers, each store instruction of its code counted once:
            the "bytes spill stores" of `ptxas -v`, over the kernel and the functions compiled into it. Local arrays
            are no part of it, nor is what a recursive function saves for its caller: ptxas marks the instructions
            that spill (in CUDA 13 for every target), and only those count.
        shared_bytes: shared memory declared with a size (dynamic shared memory is asked for at launch).
        reserved_shared_bytes: what the system takes of each block's shared memory on top: 1024 from compute
            capability 9.0 on, else 0.
        local_bytes: local memory outside of the stack; only code linked from several parts has any.
        max_threads: threads a block at most, as `__launch_bounds__` says, or None where it says nothing.
        code_bytes: size of its machine code.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    reserved_shared_bytes: int
    local_bytes: int
    max_threads: int | None
    code_bytes: int


@dataclass(frozen=True)
class CubinInfo:
    """What is in a cubin.

    Attributes:
        arch: the chip it runs on, "sm_121". The ELF header has no room for the suffix.
        target: what it was compiled for, "sm_121a", by the note that ptxas leaves; None where there is no such note.
        kernels: every kernel, sorted by name.
        size: where the ELF file ends by its own account, bytes.
    """

    arch: str
    target: str | None
    kernels: tuple[KernelResources, ...]
    size: int

    def kernel(self, name: str) -> KernelResources:
        """The kernel `name`.

        Raises:
            ToolchainError: there is none of that name.
        """
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        present = ", ".join(kernel.name for kernel in self.kernels) or "none"
        raise ToolchainError(f"there is no kernel {name!r} in this cubin; it has: {present}")


def read(image: bytes) -> CubinInfo:
    """What is in the cubin `image`.

    Raises:
        ToolchainError: it is not a whole cubin.
    """
    file = elf.Elf(image)
    if file.machine != _EM_CUDA:
        raise ToolchainError(f"not a cubin: an ELF file for machine {file.machine}, where CUDA is {_EM_CUDA}")
    if file.abi < _ABI:
        raise ToolchainError(f"a cubin of ABI {file.abi}; jitmx reads those of CUDA 13, ABI {_ABI}")
    number = file.flags >> 8 & 0xFF
    kernels = sorted(_kernels(file, number), key=lambda kernel: kernel.name)
    return CubinInfo(f"sm_{number}", _target(file), tuple(kernels), file.size)


def sass(image: bytes) -> list[str]:
    """The instructions of the cubin `image`, one a line, without offsets: `@!P0 LDG.E.128 R4, desc[UR4][R2.64]`.

    Raises:
        ToolchainError: nvdisasm is missing, or refuses the image.
    """
    return _instructions(disassemble(image))


def sass_of(images: Sequence[bytes], target: str) -> list[list[str]]:
    """The instructions of each of several cubins for one target, by one run of nvdisasm, which is slow.

    They are those of `sass`, but where a branch goes is not to be told by them: what is the same is listed once.

    Args:
        target: such as `sm_121a`.

    Raises:
        ToolchainError: nvdisasm is missing or does not know the target, or an image is not a whole cubin.
    """
    size = _INSTRUCTION.size
    code = []
    for image in images:
        file = elf.Elf(image)
        own = b"".join(file.data(part) for part in file.sections if part.name.startswith(".text."))
        code.append([own[at : at + size] for at in range(0, len(own), size)])
    once = dict.fromkeys(itertools.chain.from_iterable(code))
    lines = _instructions(_nvdisasm(b"".join(once), "-b", target.replace("sm_", "SM"))) if once else []
    if len(lines) != len(once):
        raise ToolchainError(f"nvdisasm lists {len(lines)} of {len(once)} instructions of {len(images)} cubins")
    listed = dict(zip(once, lines, strict=True))
    return [[listed[word] for word in part] for part in code]


def disassemble(image: bytes) -> str:
    """The listing that nvdisasm makes of the code in the cubin `image`, with offsets, labels and function names.

    Raises:
        ToolchainError: nvdisasm is missing, or refuses the image.
    """
    return _nvdisasm(image, "-c")


def _instructions(listing: str) -> list[str]:
    return _LISTED.findall(listing)


def _nvdisasm(image: bytes, *options: str) -> str:
    wheel = "nvidia-cuda-nvdisasm"
    program = wheels.find("bin/nvdisasm", wheel=wheel, purpose="to show and check machine code")
    try:
        # In memory, so that it works where no temporary directory can be written.
        with os.fdopen(os.memfd_create("kernel.cubin"), "wb", buffering=0) as file:
            rest = memoryview(image)
            while rest:
                rest = rest[file.write(rest) :]
            done = subprocess.run(
                # Its dataflow analysis is for the branch stacks of older targets. The image is its standard input: any
                # other descriptor could have the number of one that is closed here, and be lost to a redirection.
                [program, "-ndf", *options, "/proc/self/fd/0"],
                cwd="/", env={"LC_ALL": "C"}, stdin=file,
                capture_output=True, timeout=_NVDISASM_SECONDS, check=False,
            )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"nvdisasm does not run: {error}", f"pip install --force-reinstall {wheel}") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise ToolchainError(
            f"nvdisasm refuses the image of {len(image)} B: {reason}", f"if the image is whole, pip install -U {wheel}"
        )
    return done.stdout.decode(errors="replace")


def _kernels(file: elf.Elf, number: int) -> Iterator[KernelResources]:
    sections = {section.name: section for section in file.sections}
    totals = _attributes(file, sections.get(".nv.info"))
    registers = _per_symbol(totals, _REGCOUNT)
    frames = _per_symbol(totals, _FRAME_SIZE)
    stacks = _per_symbol(totals, _MIN_STACK_SIZE)
    for symbol in file.symbols:
        if symbol.type != elf.STT_FUNC or not symbol.other & _STO_ENTRY:
            continue
        name = symbol.name
        text = sections.get(f".text.{name}")
        if text is None or symbol.index not in registers:
            raise ToolchainError(f"malformed cubin: the kernel {name!r} has no code or no register count")
        own = _attributes(file, sections.get(f".nv.info.{name}"))
        frame, stack = frames.get(symbol.index, 0), stacks.get(symbol.index, 0)
        shared = _size(sections.get(f".nv.shared.{name}"))
        reserved = min(shared, _RESERVED_SHARED) if number >= 90 else 0
        yield KernelResources(
            name=name,
            registers=registers[symbol.index],
            stack_bytes=frame if stack == _UNBOUNDED else max(frame, stack),
            spill_bytes=_spilled(own, file.data(text), name),
            shared_bytes=shared - reserved,
            reserved_shared_bytes=reserved,
            local_bytes=_size(sections.get(f".nv.local.{name}")),
            max_threads=_threads(own),
            code_bytes=text.size,
        )


def _attributes(file: elf.Elf, section: elf.Section | None) -> list[tuple[int, bytes]]:
    """Code and content of every sized attribute in an info section; those that hold two bytes at most are left out."""
    found = []
    data = file.data(section) if section else b""
    position = 0
    while position + _ATTRIBUTE.size <= len(data):
        form, code, size = _ATTRIBUTE.unpack_from(data, position)
        position += _ATTRIBUTE.size
        if form == _FORMAT_SIZED:
            if position + size > len(data):
                raise ToolchainError(f"malformed cubin: attribute {code:#x} is cut off")
            found.append((code, data[position : position + size]))
            position += size
    return found


def _per_symbol(attributes: list[tuple[int, bytes]], code: int) -> dict[int, int]:
    """Symbol index to value, for an attribute that is given for each function."""
    return {symbol: value for found, data in attributes if found == code for symbol, value in _pairs(data)}


def _pairs(data: bytes) -> Iterator[tuple[int, int]]:
    if len(data) % _PAIR.size:
        raise ToolchainError(f"malformed cubin: an attribute of {len(data)} B, where pairs of 4 B were expected")
    return _PAIR.iter_unpack(data)


def _spilled(attributes: list[tuple[int, bytes]], code: bytes, name: str) -> int:
    """Bytes stored to local memory by the instructions that ptxas marked as spills."""
    total = 0
    for kind, offset in (pair for found, data in attributes if found == _ANNOTATIONS for pair in _pairs(data)):
        if kind != _SPILL_REFILL:
            continue
        if offset + _INSTRUCTION.size > len(code):
            raise ToolchainError(f"malformed cubin: a spill at {offset} of the {len(code)} B of {name!r}")
        low, high = _INSTRUCTION.unpack_from(code, offset)
        if low & 0xFFF == _STL:
            total += _WIDTH[high >> 9 & 7]
    return total


def _threads(attributes: list[tuple[int, bytes]]) -> int | None:
    for code, data in attributes:
        if code in (_MAX_THREADS, _REQUIRED_THREADS) and len(data) == _TRIPLE.size:
            x, y, z = _TRIPLE.unpack(data)
            return int(x * y * z)
    return None


def _size(section: elf.Section | None) -> int:
    return section.size if section else 0


def _target(file: elf.Elf) -> str | None:
    """The target by the note of ptxas, which ends in its command line."""
    for section in file.sections:
        if section.type == elf.SHT_NOTE:
            for kind, content in file.notes(section):
                match = _COMMAND.search(content) if kind == _NOTE_TOOL else None
                if match is not None:
                    return match[1].decode()
    return None
