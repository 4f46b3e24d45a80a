// What cuTensorMapEncodeTiled makes; a kernel takes it by value.
#pragma once

namespace jitmx {

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};
static_assert(sizeof(TensorMap) == 128, "what the driver makes");

}  // namespace jitmx
