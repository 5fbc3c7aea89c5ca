// The one thing that the core says back to a shim.
#pragma once

#include <cstdint>

#include "rust/cxx.h"

namespace smd {

// Ends one asynchronous operation. The core owns it from `submit` on, calls `done` once from one of its threads and
// destroys it there, so both must be callable on any thread, must not take Python's lock, and should be short: the
// next operation of the group waits for them.
class Completion {
 public:
  Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;
  virtual ~Completion() = default;

  // `error` is the core's report, ending in ` [smd:<code>]`; empty if the operation succeeded. `source` is the member
  // whose message a receive got, -1 otherwise.
  virtual void done(rust::Str error, std::int64_t source) noexcept = 0;
};

}  // namespace smd
