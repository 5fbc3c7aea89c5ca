// Reduces gradients as a graph makes them.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "adapter.h"
#include "smd/gradient_owner.h"
#include "smd/src/bridge.rs.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {

// One execution of an operation that gives gradients to a plan's reducer and gets them back, as its outputs. The
// kernel's `done` is called when the last one is back; no thread of TensorFlow waits.
class GradientCall final : public GradientOwner, public std::enable_shared_from_this<GradientCall> {
 public:
  // `whole`: it gives all gradients of a step, which was made outside of a graph.
  GradientCall(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
               const GradientPlan& plan, const Execution& execution, bool whole);

  // From now on the plan hears if the execution ends before the step; false if it has ended. The callback outlives this
  // call if the step does: other gradients of it may never come.
  bool watch();

  // Puts input `position` where the core can reduce it, and tells the core. The kernel's context may be gone
  // afterwards, if it was the last one.
  void give(std::size_t position, std::size_t param);

  void reduced(std::size_t position, rust::Str error, rust::Box<SlotLease> lease) const noexcept override;
  std::uint8_t* allocate(std::size_t position, std::size_t bytes) const override;
  void release() const noexcept override;

 private:
  void answer(std::size_t position, const absl::Status& status, tensorflow::Tensor* output) const;

  tensorflow::OpKernelContext* context_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  const GradientPlan& plan_;
  Place place_;
  Execution execution_;
  bool whole_;
  tensorflow::CancellationManager* cancellation_;
  tensorflow::CancellationToken token_ = tensorflow::CancellationManager::kInvalidToken;
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
  // Guards the context and what follows.
  mutable std::mutex mutex_;
  mutable std::size_t pending_;
  // What the core uses on a device until this call ends.
  mutable std::vector<tensorflow::Tensor> held_tensors_;
};

}  // namespace smd::tf_ops
