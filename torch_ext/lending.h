// Lets a gradient be made in the memory in which it is reduced.
#pragma once

#include <cstddef>
#include <memory>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// A core reducer that several parts of the shim hold.
using SharedReducer = std::shared_ptr<rust::Box<smd::Reducer>>;

// From now on, tensors made on this thread may get slots of `reducer`; null ends this. Installs the allocator that
// asks at its first use.
void lend_on_this_thread(SharedReducer reducer);

}  // namespace smd::torch_ext
