// The framework's operation that submits gradients to a reducer and gets them back reduced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "rust/cxx.h"

namespace smd {

struct SlotLease;

// One operation of a framework. The core holds it until all of its gradients are answered. All functions may be
// called on any thread, also concurrently, and must not take Python's lock.
class GradientOwner {
 public:
  GradientOwner() = default;
  GradientOwner(const GradientOwner&) = delete;
  GradientOwner& operator=(const GradientOwner&) = delete;
  virtual ~GradientOwner() = default;

  // Answers the gradient that was submitted as `position`: it is reduced, in the slot that `lease` holds, or in
  // place. `error` is the core's report, ending in ` [smd:<code>]`; empty on success. Called once for each gradient.
  virtual void reduced(std::size_t position, rust::Str error, rust::Box<SlotLease> lease) const noexcept = 0;

  // Allocates `bytes` bytes on the device of the gradient `position`, to be kept until that gradient is answered.
  // Earlier uses of the memory must have been queued into the gradient's stream. Throws a std::exception if there is
  // no memory. Called with locks of the core held.
  virtual std::uint8_t* allocate(std::size_t position, std::size_t bytes) const {
    (void)position;
    throw std::logic_error("no memory for " + std::to_string(bytes) + " bytes of gradients on a device");
  }

  // All gradients of the step are reduced; some may not be answered yet. Called with locks of the core held.
  virtual void release() const noexcept = 0;
};

}  // namespace smd
