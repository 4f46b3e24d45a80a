// Programmatic dependent launch (sm_90 and newer).
#pragma once

namespace jitmx {

// Lets the next kernel of the stream start.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Waits until the previous kernel is done and its writes are visible.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace jitmx
