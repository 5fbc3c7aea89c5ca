#include "placing_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <mutex>
#include <utility>

#include "smd/placed_slots.h"

namespace smd::torch_ext {
namespace {

thread_local SharedReducer placing_reducer;

// PyTorch's CPU allocator, except that on a thread in backward an allocation which is predicted to become a gradient
// gets that gradient's slot. Such a tensor is valid whatever it becomes. The slot is in use until its last reference
// is gone; if another tensor becomes the gradient, that one is copied or reduced in place.
//
// This saves one pass over all gradients in each step, and the page faults of fresh memory (docs/performance.md).
class PlacingAllocator final : public c10::Allocator {
 public:
  explicit PlacingAllocator(c10::Allocator* base) : base_(base), release_base_(base->raw_deleter()) {}

  // Lives as long as the process, as PyTorch's own allocator does, because tensors may outlive everything else.
  static PlacingAllocator& instance() {
    static auto* allocator = new PlacingAllocator(c10::GetCPUAllocator());
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kMinPlacedBytes || !placing_reducer) return base_->allocate(bytes);
    if (void* data = slots_.keep((*placing_reducer)->place(bytes))) {
      // oneDNN uses raw allocations, which have no context. So a slot's deleter identifies the slot by the address
      // alone.
      return {data, data, release, c10::DeviceType::CPU};
    }
    auto memory = base_->allocate(bytes);
    (*placing_reducer)->placed_elsewhere(bytes, static_cast<const std::uint8_t*>(memory.get()));
    return memory;
  }

  // Frees slots as well as memory of PyTorch's allocator.
  c10::DeleterFnPtr raw_deleter() const override { return release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    auto& self = instance();
    if (!self.slots_.release(data)) self.release_base_(data);
  }

  c10::Allocator* base_;
  c10::DeleterFnPtr release_base_;
  PlacedSlots slots_;
};

}  // namespace

void place_on_this_thread(SharedReducer reducer) {
  static std::once_flag installed;
  if (reducer) {
    std::call_once(installed, [] {
      // An allocator without raw allocations cannot be replaced. Every gradient is copied then.
      if (c10::GetCPUAllocator()->raw_deleter() != nullptr) c10::SetCPUAllocator(&PlacingAllocator::instance());
    });
    (*reducer)->start_placement();
  }
  placing_reducer = std::move(reducer);
}

}  // namespace smd::torch_ext
