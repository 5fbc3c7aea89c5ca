// A framework's key-value store, through which ranks that no launcher started find each other.
#pragma once

#include <cstdint>

#include "rust/cxx.h"

namespace smd {

// The core owns it until all ranks have joined. Its functions may be called on any thread, also concurrently; they
// must not wait for other ranks or take Python's lock. They may throw a std::exception, whose text becomes part of
// the core's error.
class BootstrapStore {
 public:
  BootstrapStore() = default;
  BootstrapStore(const BootstrapStore&) = delete;
  BootstrapStore& operator=(const BootstrapStore&) = delete;
  virtual ~BootstrapStore() = default;

  virtual void set(rust::Str key, rust::Slice<const std::uint8_t> value) const = 0;
  // Appends the value of `key` to `value`; returns false if the key is not written.
  virtual bool get(rust::Str key, rust::Vec<std::uint8_t>& value) const = 0;
  virtual void remove(rust::Str key) const = 0;
};

}  // namespace smd
