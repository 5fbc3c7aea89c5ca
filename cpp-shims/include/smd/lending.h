// Slots of reducers as memory of tensors: what both frameworks' lending allocators keep.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "smd/src/bridge.rs.h"

namespace smd {

// Copying a smaller gradient costs less than asking for its slot.
constexpr std::size_t kLendBytes = 64 << 10;

// Slots that are lent, by address: that is all an allocator is told of memory that it gets back.
class LentSlots {
 public:
  // Keeps the lease; null if it holds nothing.
  void* keep(rust::Box<SlotLease> lease) {
    void* data = lease->ptr();
    if (data != nullptr) {
      const std::lock_guard lock(mutex_);
      leases_.emplace(data, std::move(lease));
      count_.store(leases_.size(), std::memory_order_relaxed);
    }
    return data;
  }

  // Gives a slot back; false if the memory is none.
  bool give_back(void* data) {
    // Whoever gives back a slot has got it after it was counted.
    if (count_.load(std::memory_order_relaxed) == 0) return false;
    const std::lock_guard lock(mutex_);
    const bool was_lent = leases_.erase(data) != 0;
    count_.store(leases_.size(), std::memory_order_relaxed);
    return was_lent;
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
