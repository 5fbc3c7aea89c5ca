// Errors of the core as TensorFlow's.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "rust/cxx.h"

namespace smd::tf_ops {

// The status that fits the code of `report`; its message is the report, unchanged. Empty text is success.
absl::Status to_status(std::string_view report);

// The same for Horovod's operations, in the classes and with the texts that its scripts look for; without the code.
// `submitted`: all ranks hear of it. Otherwise this rank could not make its call, and the others have not heard of it.
absl::Status to_horovod_status(std::string_view report, bool submitted);

// Runs `body`, which calls the core; every kernel passes through here.
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
