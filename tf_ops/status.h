// Converts errors of the core to TensorFlow's.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "rust/cxx.h"

namespace smd::tf_ops {

// The status for the error code in `report`; the message is the unchanged report. An empty report is success.
absl::Status to_status(std::string_view report);

// The same for Horovod's operations, with the classes and texts that Horovod's scripts look for, and without the code.
// `submitted` says that all ranks see this error. Otherwise this rank could not submit its call, and the other ranks do
// not know of it.
absl::Status to_horovod_status(std::string_view report, bool submitted);

// Runs `body` and converts what it throws. Every call from a kernel to the core goes through here.
template <class Body>
absl::Status checked(Body&& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const rust::Error& error) {
    return to_status(error.what());
  }
}

}  // namespace smd::tf_ops
