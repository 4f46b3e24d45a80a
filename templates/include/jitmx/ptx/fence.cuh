// Fences between the generic proxy and that of bulk copies and wgmma.
#pragma once

namespace jitmx {

// What was written through the generic proxy, and is known to this thread, becomes visible to bulk copies that follow.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// What this thread has written to shared memory is known to products past it.
__device__ __forceinline__ void async_proxy_fence_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jitmx
