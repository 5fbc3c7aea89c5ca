#include "lending.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <mutex>
#include <utility>

#include "smd/lending.h"

namespace smd::torch_ext {
namespace {

thread_local SharedReducer lender;

// PyTorch's CPU allocator, except that on a thread in backward a tensor that will be a gradient gets that gradient's
// slot. Whatever becomes of such a tensor, it is memory like any other: the slot is taken until the last reference is
// gone, and if something else becomes the gradient, that is copied or reduced where it lies.
//
// This saves a pass over all gradients per step, and the page faults of fresh memory (docs/performance.md).
class LendingAllocator final : public c10::Allocator {
 public:
  explicit LendingAllocator(c10::Allocator* base) : base_(base), release_base_(base->raw_deleter()) {}

  // Lives as long as the process, as PyTorch's own allocator does: tensors may outlive everything else.
  static LendingAllocator& instance() {
    static auto* allocator = new LendingAllocator(c10::GetCPUAllocator());
    return *allocator;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes < kLendBytes || !lender) return base_->allocate(bytes);
    if (void* data = slots_.keep((*lender)->lend(bytes))) {
      // oneDNN asks for raw memory, which is an address and no more: so the address is all that a slot's deleter gets.
      return {data, data, release, c10::DeviceType::CPU};
    }
    auto memory = base_->allocate(bytes);
    (*lender)->lent_elsewhere(bytes, static_cast<const std::uint8_t*>(memory.get()));
    return memory;
  }

  // Fits slots and the base's memory alike.
  c10::DeleterFnPtr raw_deleter() const override { return release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void release(void* data) {
    auto& self = instance();
    if (!self.slots_.give_back(data)) self.release_base_(data);
  }

  c10::Allocator* base_;
  c10::DeleterFnPtr release_base_;
  LentSlots slots_;
};

}  // namespace

void lend_on_this_thread(SharedReducer reducer) {
  static std::once_flag installed;
  if (reducer) {
    std::call_once(installed, [] {
      // An allocator without raw memory cannot be stood in for; then every gradient is copied.
      if (c10::GetCPUAllocator()->raw_deleter() != nullptr) c10::SetCPUAllocator(&LendingAllocator::instance());
    });
    (*reducer)->start_lending();
  }
  lender = std::move(reducer);
}

}  // namespace smd::torch_ext
