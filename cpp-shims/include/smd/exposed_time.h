// The time in which a thread of the script waits for communication, which the core counts.
#pragma once

#include <chrono>
#include <cstdint>

#include "smd/src/bridge.rs.h"

namespace smd {

// Counts the time of its own life.
class ExposedTime {
 public:
  ExposedTime() = default;
  ExposedTime(const ExposedTime&) = delete;
  ExposedTime& operator=(const ExposedTime&) = delete;
  ~ExposedTime() {
    const auto time = std::chrono::steady_clock::now() - start_;
    note_exposed(static_cast<std::uint64_t>(std::chrono::nanoseconds(time).count()));
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace smd
