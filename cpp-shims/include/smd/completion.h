// The one thing that the core says back to a shim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "rust/cxx.h"

namespace smd {

struct TensorView;

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

  // Of operations on rows, which are the only ones to call it, at most once and before `done`, on one of the core's
  // threads: appends to `outputs` memory for `rows[i]` rows from member i, for every member, that is valid until
  // `done`. What it throws is a std::exception whose text all members get.
  virtual void make_outputs(rust::Slice<const std::size_t> rows, rust::Vec<TensorView>& outputs) {
    (void)rows;
    (void)outputs;
    throw std::logic_error("this operation does not make its outputs");
  }
};

}  // namespace smd
