// What cuTensorMapEncodeTiled makes; a kernel takes it by value.
#pragma once

namespace jitmx {

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

}  // namespace jitmx
