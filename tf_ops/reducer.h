// Reduces gradients while a graph computes them.
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

// One execution of an operation whose inputs are gradients for a plan's reducer and whose outputs are the reduced
// gradients. The kernel's `done` is called with the last reduced gradient; no thread of TensorFlow waits.
class GradientCall final : public GradientOwner, public std::enable_shared_from_this<GradientCall> {
 public:
  // `whole` says that the operation has all gradients of a step and runs outside of a graph.
  GradientCall(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done,
               const GradientPlan& plan, const Execution& execution, bool whole);

  // Notifies the plan if the execution ends before the step does. Returns false if the execution has ended already. The
  // callback may outlive this call, because other gradients of the step may never arrive.
  bool watch();

  // Copies input `position` to where the core can reduce it, if necessary, and reports it as ready. After the last
  // input the kernel's context may be gone when this returns.
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
  // Guards the context and the members below.
  mutable std::mutex mutex_;
  mutable std::size_t pending_;
  // Device memory that the core uses until this call ends.
  mutable std::vector<tensorflow::Tensor> held_tensors_;
};

}  // namespace smd::tf_ops
