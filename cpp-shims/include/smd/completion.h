// The callback with which the core reports the end of an operation to a shim.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "rust/cxx.h"

namespace smd {

struct TensorView;

// The callback of one asynchronous operation. The core owns it from `submit` on, calls `done` once on one of its
// threads and destroys it there. So both must be callable on any thread and must not take Python's lock. Both should
// be short, because the next operation of the group waits for them.
class Completion {
 public:
  Completion() = default;
  Completion(const Completion&) = delete;
  Completion& operator=(const Completion&) = delete;
  virtual ~Completion() = default;

  // `error` is the core's report, ending in ` [smd:<code>]`; empty if the operation succeeded. `source` is the member
  // whose message a receive got, -1 otherwise.
  virtual void done(rust::Str error, std::int64_t source) noexcept = 0;

  // Allocates the outputs of an operation on rows: appends to `outputs` memory for `rows[i]` rows from member i, for
  // every member, that stays valid until `done`. Called at most once, before `done`, on a thread of the core. It may
  // throw a std::exception, whose text all members get as an error.
  virtual void make_outputs(rust::Slice<const std::size_t> rows, rust::Vec<TensorView>& outputs) {
    (void)rows;
    (void)outputs;
    throw std::logic_error("this operation does not allocate its outputs");
  }
};

}  // namespace smd
