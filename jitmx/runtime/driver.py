"""The few CUDA driver calls that jitmx makes, through ctypes.

CuPy would take a quarter of a second to import. Its launch has no attributes (programmatic dependent launch needs one)
and costs more Python time than a whole launch may.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

from jitmx.errors import DriverError
from jitmx.registry.tensor_map import PROMOTIONS, SWIZZLES, TensorMap

_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR, _ATTRIBUTE_MULTIPROCESSORS = 75, 76, 16
INVALID_CONTEXT = 201
_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_TENSOR_MAP_TYPES = {"u8": 0, "e4m3": 0, "fp16": 6, "bf16": 9}
_TENSOR_MAP_ALIGNMENT = 128
_FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, padding, and a 64-byte value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint), ("grid_y", ctypes.c_uint), ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint), ("block_y", ctypes.c_uint), ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)), ("attribute_count", ctypes.c_uint),
    )  # fmt: skip


def programmatic_dependent_launch() -> LaunchAttribute:
    """The launch attribute that lets a kernel start before its predecessor in the stream has ended."""
    attribute = LaunchAttribute(id=_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    return attribute


def allow_large_clusters(function: int) -> None:
    """Let launches of a function have clusters that not every chip with clusters can hold.

    Raises:
        DriverError: the driver refuses.
    """
    code = library().cuFuncSetAttribute(ctypes.c_void_p(function), _NON_PORTABLE_CLUSTER, ctypes.c_int(1))
    check(code, "cuFuncSetAttribute(clusters of more than 8 blocks)")


def cluster_dimension(blocks: int) -> LaunchAttribute:
    """The launch attribute that makes so many neighbouring blocks a cluster."""
    attribute = LaunchAttribute(id=_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    attribute.value[0], attribute.value[1], attribute.value[2] = blocks, 1, 1
    return attribute


@dataclass(frozen=True)
class Device:
    """One GPU as the driver describes it."""

    index: int
    name: str
    major: int
    minor: int
    multiprocessors: int


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda.

    Raises:
        DriverError: no NVIDIA driver is installed.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"the NVIDIA driver's library libcuda.so.1 cannot be loaded ({error})",
            "install the driver to run kernels (compiling them takes none)",
        ) from error


def check(code: int, call: str) -> None:
    """Raise DriverError where the driver's return code is not 0."""
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(
            f"{call} failed: {text.value.decode() if text.value else 'unknown error'} (CUDA error {code})"
        )


def version() -> tuple[int, int]:
    """CUDA release that the driver supports."""
    number = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
    return number.value // 1000, number.value % 1000 // 10


def devices() -> list[Device]:
    """The GPUs of this machine; creates no context. Empty where there is a driver but no GPU.

    Raises:
        DriverError: no driver, or it cannot be initialised.
    """
    cuda = library()
    code = cuda.cuInit(0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE
        return []
    check(code, "cuInit")
    count = ctypes.c_int()
    check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_device(cuda, index) for index in range(count.value)]


def _device(cuda: ctypes.CDLL, index: int) -> Device:
    handle, name, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
    check(cuda.cuDeviceGet(ctypes.byref(handle), index), "cuDeviceGet")
    check(cuda.cuDeviceGetName(name, 256, handle), "cuDeviceGetName")
    numbers = []
    for attribute in (_ATTRIBUTE_MAJOR, _ATTRIBUTE_MINOR, _ATTRIBUTE_MULTIPROCESSORS):
        check(cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle), "cuDeviceGetAttribute")
        numbers.append(value.value)
    return Device(index, name.value.decode(), *numbers)


def bind_primary_context(device: int) -> None:
    """Make the primary context of a device current in this thread: a thread that never called CUDA has none."""
    cuda, handle, context = library(), ctypes.c_int(), ctypes.c_void_p()
    check(cuda.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def load_module(image: bytes) -> int:
    """The CUmodule of a cubin in the thread's current context, where it stays.

    Raises:
        DriverError: the driver refuses the cubin, or has no memory for it.
    """
    module = ctypes.c_void_p()
    check(library().cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(image)), "cuModuleLoadData")
    return int(module.value or 0)


def module_function(module: int, name: str) -> int:
    """The CUfunction called `name` of a module.

    Raises:
        DriverError: it has none.
    """
    function = ctypes.c_void_p()
    code = library().cuModuleGetFunction(ctypes.byref(function), ctypes.c_void_p(module), name.encode())
    check(code, f"cuModuleGetFunction({name})")
    return int(function.value or 0)


def allow_dynamic_shared(function: int, size: int) -> None:
    """Raise the dynamic shared memory that `function` may be launched with to `size` bytes."""
    code = library().cuFuncSetAttribute(
        ctypes.c_void_p(function), _FUNCTION_ATTRIBUTE_MAX_DYNAMIC_SHARED, ctypes.c_int(size)
    )
    check(code, f"cuFuncSetAttribute(max dynamic shared memory = {size} B)")


def capture_number(stream: int) -> int:
    """A number that no other graph capture of this process has; 0 where `stream` is not being captured."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    code = library().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None
    )
    check(code, "cuStreamGetCaptureInfo")
    return number.value if status.value == 1 else 0  # CU_STREAM_CAPTURE_STATUS_ACTIVE


def aligned_buffer(size: int) -> ctypes.Array[ctypes.c_char]:
    """Zeroed host memory of `size` bytes that may hold tensor maps."""
    room = ctypes.create_string_buffer(size + _TENSOR_MAP_ALIGNMENT)
    return (ctypes.c_char * size).from_buffer(room, -ctypes.addressof(room) % _TENSOR_MAP_ALIGNMENT)


def encode_tensor_map(buffer: ctypes.Array[ctypes.c_char], at: int, shown: TensorMap) -> ctypes.c_void_p:
    """Write a tensor map into an aligned buffer, which `move_tensor_map` gives its address.

    Args:
        at: where it lies in the buffer, bytes.

    Returns:
        The map's place, as `move_tensor_map` takes it.

    Raises:
        DriverError: the driver refuses such a map.
    """
    place, rank = ctypes.c_void_p(ctypes.addressof(buffer) + at), len(shown.sizes)
    code = library().cuTensorMapEncodeTiled(
        place,
        ctypes.c_int(_TENSOR_MAP_TYPES[shown.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(1 << 20),  # any address; there is none yet
        (ctypes.c_uint64 * rank)(*shown.sizes),
        (ctypes.c_uint64 * max(rank - 1, 1))(*shown.strides),
        (ctypes.c_uint32 * rank)(*shown.box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),  # no interleaving
        ctypes.c_int(SWIZZLES.index(shown.swizzle)),
        ctypes.c_int(PROMOTIONS.index(shown.promotion)),
        ctypes.c_int(0),  # what lies outside is zero
    )
    check(code, f"cuTensorMapEncodeTiled({shown})")
    return place


def move_tensor_map(place: ctypes.c_void_p, address: int) -> None:
    """Let a tensor map show what lies at another address, a multiple of 16.

    Raises:
        DriverError: the driver refuses the address.
    """
    code = library().cuTensorMapReplaceAddress(place, ctypes.c_void_p(address))
    if code:
        check(code, f"cuTensorMapReplaceAddress({address:#x})")
