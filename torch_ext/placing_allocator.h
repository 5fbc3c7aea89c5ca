// Allocates gradients directly in the memory in which they are reduced.
#pragma once

#include <cstddef>
#include <memory>

#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// A reducer of the core that several objects of this library share.
using SharedReducer = std::shared_ptr<rust::Box<smd::Reducer>>;

// Sets the reducer whose slots allocations of this thread may use; null ends this. The first call installs the
// allocator.
void place_on_this_thread(SharedReducer reducer);

}  // namespace smd::torch_ext
