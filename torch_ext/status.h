// Errors of the core as PyTorch's.
#pragma once

#include <string>

#include "rust/cxx.h"

namespace smd::torch_ext {

// Throws the c10 error that fits the code of `report`; its message is the report, unchanged.
[[noreturn]] void throw_report(const std::string& report);

// Runs `body`, which calls the core; every kernel passes through here.
template <class Body>
auto checked(Body&& body) {
  try {
    return body();
  } catch (const rust::Error& error) {
    throw_report(error.what());
  }
}

}  // namespace smd::torch_ext
