// Allocates gradients in the memory in which they are reduced.
#pragma once

#include <cstddef>
#include <memory>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// A core reducer that several parts of the shim hold.
using SharedReducer = std::shared_ptr<rust::Box<smd::Reducer>>;

// Lets allocations of this thread be placed in slots of `reducer` from now on; null ends this. The first call installs
// the allocator.
void place_on_this_thread(SharedReducer reducer);

}  // namespace smd::torch_ext
