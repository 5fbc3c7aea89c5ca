// A framework's key-value store, on which the ranks of a job meet that no launcher started.
#pragma once

#include <cstdint>

#include "rust/cxx.h"

namespace smd {

// The core owns it until the job has come together. Any thread may call it, several at once; nothing of it waits for
// other ranks or takes Python's lock. What it throws is a std::exception whose text the core passes on.
class BootstrapStore {
 public:
  BootstrapStore() = default;
  BootstrapStore(const BootstrapStore&) = delete;
  BootstrapStore& operator=(const BootstrapStore&) = delete;
  virtual ~BootstrapStore() = default;

  virtual void set(rust::Str key, rust::Slice<const std::uint8_t> value) const = 0;
  // Appends to `value` what was written to `key`; false if nothing was.
  virtual bool get(rust::Str key, rust::Vec<std::uint8_t>& value) const = 0;
  virtual void remove(rust::Str key) const = 0;
};

}  // namespace smd
