// Slots of reducers that serve as memory of tensors, for the placing allocators of both frameworks.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "smd/src/bridge.rs.h"

namespace smd {

// Smallest allocation that is placed in a slot, in bytes. Copying a smaller gradient costs less than finding its slot.
constexpr std::size_t kMinPlacedBytes = 64 << 10;

// Leases of slots that hold tensors, by address: an allocator learns only the address of memory that is freed.
class PlacedSlots {
 public:
  // Keeps the lease; returns null if the lease is empty.
  void* keep(rust::Box<SlotLease> lease) {
    void* data = lease->ptr();
    if (data != nullptr) {
      const std::lock_guard lock(mutex_);
      leases_.emplace(data, std::move(lease));
      count_.store(leases_.size(), std::memory_order_relaxed);
    }
    return data;
  }

  // Frees a slot; false if the memory is not a slot.
  bool release(void* data) {
    // A slot is counted before its address is returned, so it cannot be freed before it is counted.
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    const std::lock_guard lock(mutex_);
    const bool was_placed = leases_.erase(data) != 0;
    count_.store(leases_.size(), std::memory_order_relaxed);
    return was_placed;
  }

  bool has(const void* data) const {
    const std::lock_guard lock(mutex_);
    return leases_.count(const_cast<void*>(data)) != 0;
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<void*, rust::Box<SlotLease>> leases_;
  std::atomic<std::size_t> count_{0};
};

}  // namespace smd
