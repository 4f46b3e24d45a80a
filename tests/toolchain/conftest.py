"""Sources and places that the toolchain's tests share. None of them needs a GPU or a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jitmx
from jitmx import settings
from jitmx.toolchain import headers, nvrtc

# What tends to make code differ from compile to compile: symbols without linkage, static variables, templates.
LOCAL_SYMBOLS = r"""
#include <cuda_bf16.h>
static __device__ int calls;
namespace {
__device__ float table[64];
struct Scale { float value; __device__ __noinline__ float operator()(float x) const { return x * value + table[0]; } };
template <int N> __device__ __noinline__ float power(float x) { return N ? x * power<N - 1>(x) : 1.f; }
template <> __device__ float power<0>(float) { return 1.f; }
}
extern "C" __global__ void entry(float* out, const __nv_bfloat16* in) {
    auto scale = [] (float x) { return Scale{2.f}(x); };
    out[threadIdx.x] = scale(__bfloat162float(in[threadIdx.x])) + power<3>(out[0]);
    calls += 1;
}
"""

# One kernel for each way to use memory.
RESOURCES = r"""
extern "C" __global__ void plain(float* a) { a[threadIdx.x] *= 2.f; }

extern "C" __global__ void __launch_bounds__(256, 2) static_shared(float* a) {
    __shared__ float s[1000];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = s[999 - threadIdx.x];
}

extern "C" __global__ void dynamic_shared(float* a) {
    extern __shared__ float s[];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = s[99 - threadIdx.x];
}

extern "C" __global__ void both_shared(float* a, int n) {
    extern __shared__ float s[];
    __shared__ double d[7];
    s[threadIdx.x] = a[threadIdx.x];
    d[threadIdx.x % 7] = a[3];
    __syncthreads();
    a[threadIdx.x] = s[99 - threadIdx.x] + d[n];
}

extern "C" __global__ void local_array(float* a, int n) {
    float l[100];
    for (int i = 0; i < n; i++) l[(i * 7) % 100] = a[i];
    float sum = 0;
    for (int i = 0; i < n; i++) sum += l[(i * 13 + n) % 100];
    a[0] = sum;
}

template <int LIVE> __device__ __forceinline__ void mix(const float* a, float* o) {
    float r[LIVE];
#pragma unroll
    for (int i = 0; i < LIVE; i++) r[i] = a[i * 1024 + threadIdx.x];
#pragma unroll
    for (int j = 0; j < 3; j++) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < LIVE; i++) r[i] = r[i] * r[(i + 17) % LIVE] + r[(i + 51) % LIVE];
    }
#pragma unroll
    for (int i = 0; i < LIVE; i++) o[i * 1024 + threadIdx.x] = r[i];
}

extern "C" __global__ void __launch_bounds__(1024) spills(const float* a, float* o) { mix<100>(a, o); }

extern "C" __global__ void __launch_bounds__(1024) spills_with_array(const float* a, float* o, int n) {
    float l[20];
    for (int i = 0; i < n; i++) l[(i * 3) % 20] = a[i];
    mix<90>(a, o);
    o[0] += l[n % 20];
}

extern "C" __global__ void __launch_bounds__(512) many_registers(const float* a, float* o) { mix<96>(a, o); }

extern "C" __global__ void __launch_bounds__(1024) spills_wide(const double2* a, double2* o) {
    double2 r[24];
#pragma unroll
    for (int i = 0; i < 24; i++) r[i] = a[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 24; i++) o[i * 1024 + threadIdx.x] = {r[i].x * r[(i + 11) % 24].y, r[i].y + r[(i + 7) % 24].x};
}

__device__ __noinline__ void mix_apart(const float* a, float* o) { mix<90>(a, o); }
extern "C" __global__ void __launch_bounds__(1024) calls(const float* a, float* o, int n) {
    float l[30];
    for (int i = 0; i < n; i++) l[(i * 3) % 30] = a[i];
    mix_apart(a, o);
    o[0] += l[n % 30];
}

template <int N> __global__ void __launch_bounds__(N) instance(float* a) { a[0] = N; }
template __global__ void instance<96>(float*);
"""


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory of these tests' own."""
    path = tmp_path_factory.mktemp("cache")
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module", autouse=True)
def cache(directory: Path) -> Iterator[Path]:
    """That directory, in use, and no other setting of jitmx; what is known of NVRTC is remembered there."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("JITMX_", "FLASHINFER_"))]:
            patch.delenv(name)
        patch.setenv("JITMX_CACHE_DIR", str(directory))
        settings.reload()
        nvrtc.identity.cache_clear()
        nvrtc.identity()
        yield directory
    settings.reload()


@pytest.fixture
def include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a header of jitmx, `include("jitmx/a.cuh", text)`, into a pool that only this test uses."""
    own = tmp_path / "include"
    (own / "jitmx").mkdir(parents=True)
    pool = headers.HeaderPool(own)
    monkeypatch.setattr(headers, "pool", lambda: pool)

    def write(name: str, text: str) -> Path:
        path = own / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture
def python(cache: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs Python code in a process of its own and returns what it printed."""

    def run(code: str, *, cwd: Path = tmp_path, package: Path = Path(jitmx.__file__).parent.parent, **env: str) -> str:
        base = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "JITMX_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=cwd,
            env={**base, **env, "PYTHONPATH": str(package)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture(scope="session")
def local_symbols() -> str:
    """A kernel with symbols in an anonymous namespace and static variables."""
    return LOCAL_SYMBOLS


@pytest.fixture(scope="session")
def resources_source() -> str:
    """Kernels that use registers, shared memory and the stack in every way."""
    return RESOURCES
