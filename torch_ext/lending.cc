#include "lending.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <utility>

namespace smd::torch_ext {
namespace {

// Smaller tensors never ask: the core would decline.
constexpr std::size_t kLendBytes = 64 << 10;

thread_local SharedReducer lender;

void give_back(void* lease) {
  // Back into the box that it was released from.
  rust::Box<SlotLease>::from_raw(static_cast<SlotLease*>(lease));
}

// PyTorch's CPU allocator, except that on a thread in backward a tensor as large as an expected gradient gets that
// gradient's slot. Whatever becomes of such a tensor, it is memory like any other: the slot is taken until the last
// reference is gone, and if something else becomes the gradient, that is copied or reduced where it lies.
//
// This saves a pass over all gradients per step, and the page faults of fresh memory (docs/performance.md).
class LendingAllocator final : public c10::Allocator {
 public:
  explicit LendingAllocator(c10::Allocator* base) : base_(base) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= kLendBytes && lender) {
      auto lease = (*lender)->lend(bytes);
      if (void* data = lease->ptr()) return {data, lease.into_raw(), give_back, c10::DeviceType::CPU};
    }
    return base_->allocate(bytes);
  }

  // True of all memory but slots. Who allocates raw memory is no operator in backward.
  c10::DeleterFnPtr raw_deleter() const override { return base_->raw_deleter(); }

  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  c10::Allocator* base_;
};

}  // namespace

void lend_on_this_thread(SharedReducer reducer) {
  static std::once_flag installed;
  if (reducer) {
    // Lives as long as the process, as PyTorch's own allocator does: tensors may outlive everything else.
    std::call_once(installed, [] { c10::SetCPUAllocator(new LendingAllocator(c10::GetCPUAllocator())); });
  }
  lender = std::move(reducer);
}

}  // namespace smd::torch_ext
