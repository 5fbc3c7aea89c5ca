// Who gives gradients to a reducer, and gets them back.
#pragma once

#include <cstddef>

#include "rust/cxx.h"

namespace smd {

struct SlotLease;

// One operation of a framework. The core holds it until all of its gradients are answered. All may be called on any
// thread, several at once, and must not take Python's lock.
class Giver {
 public:
  Giver() = default;
  Giver(const Giver&) = delete;
  Giver& operator=(const Giver&) = delete;
  virtual ~Giver() = default;

  // The gradient that was given as `position` is reduced, in the slot that `lease` holds, or where it lay. `error` is
  // the core's report, ending in ` [smd:<code>]`; empty if all went well. Once for each gradient.
  virtual void reduced(std::size_t position, rust::Str error, rust::Box<SlotLease> lease) const noexcept = 0;

  // All gradients of the step are reduced; some may not be answered yet. Called with locks of the core held.
  virtual void release() const noexcept = 0;
};

}  // namespace smd
