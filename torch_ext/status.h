// Converts errors of the core to PyTorch's.
#pragma once

#include <string>

#include "rust/cxx.h"

namespace smd::torch_ext {

// Throws the c10 error for the error code in `report`; its message is the unchanged report.
[[noreturn]] void throw_report(const std::string& report);

// Runs `body` and converts what it throws. Every call from a kernel to the core goes through here.
template <class Body>
auto checked(Body&& body) {
  try {
    return body();
  } catch (const rust::Error& error) {
    throw_report(error.what());
  }
}

}  // namespace smd::torch_ext
