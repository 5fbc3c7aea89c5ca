#include "reducer.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "status.h"
#include "tensorflow/core/framework/allocation_description.pb.h"

namespace smd::tf_ops {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// A tensor's buffer that is a reducer's slot. The slot is in use until the last reference to the tensor is gone.
class SlotBuffer final : public tensorflow::TensorBuffer {
 public:
  SlotBuffer(rust::Box<SlotLease> lease, std::size_t bytes)
      : TensorBuffer(lease->ptr()), lease_(std::move(lease)), bytes_(bytes) {}

  std::size_t size() const override { return bytes_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(static_cast<std::int64_t>(bytes_));
  }

 private:
  rust::Box<SlotLease> lease_;
  std::size_t bytes_;
};

}  // namespace

GradientCall::GradientCall(OpKernelContext* context, AsyncOpKernel::DoneCallback done, const GradientPlan& plan,
                           const Execution& execution, bool whole)
    : context_(context),
      done_(std::move(done)),
      plan_(plan),
      place_(place_of(context)),
      execution_(execution),
      whole_(whole),
      cancellation_(context->cancellation_manager()),
      pending_(static_cast<std::size_t>(context->num_inputs())) {}

bool GradientCall::watch() {
  if (cancellation_ == nullptr) return true;
  token_ = cancellation_->get_cancellation_token();
  // The callback captures the plan and not this object, because it may run after the execution and its context are
  // gone.
  auto plan = std::make_shared<rust::Box<GradientPlan>>(plan_.share());
  return cancellation_->RegisterCallback(token_, [plan, ended = ended_, execution = execution_] {
    ended->store(true);
    (*plan)->ended(execution);
  });
}

void GradientCall::give(std::size_t position, std::size_t param) {
  const auto index = static_cast<int>(position);
  const Tensor& input = context_->input(index);
  const auto* made = static_cast<const std::uint8_t*>(input.data());
  // Outside of a graph, no operation recurs from step to step, and the script may hold the inputs; nothing is predicted
  // then.
  auto lease = plan_.take_slot(param, made, !whole_);
  TensorView gradient = describe(input, place_);
  // The core reports a gradient on a device that belongs to a plan for the CPU.
  if (place_.device == DeviceKind::Cpu && lease->ptr() != nullptr && input.NumElements() > 0) {
    gradient.ptr = lease->ptr();
    const auto filled = checked([&] { lease->fill(made); });
    if (!filled.ok()) return answer(position, filled, nullptr);
  } else {
    // The gradient is used where it is: it lies in its slot, all slots are in use, the reducer does not exist yet, or
    // it is on a device and reduced in place.
    Tensor* output = nullptr;
    auto status = context_->forward_input_or_allocate_output({index}, index, input.shape(), &output);
    if (status.ok() && output->data() != input.data()) {
      if (!whole_) plan_.placement_was_unused(param);
      gradient = describe(*output, place_);
      status = checked([&] { copy(describe(input, place_), gradient); });
    }
    if (!status.ok()) return answer(position, status, nullptr);
  }
  // Keeps this object alive: the core may complete the call, and TensorFlow may destroy the kernel's context, before
  // `arrive` returns.
  const auto self = shared_from_this();
  const auto status = checked([&] { plan_.arrive(param, gradient, std::move(lease), execution_, self, position); });
  if (!status.ok()) answer(position, status, nullptr);
}

std::uint8_t* GradientCall::allocate(std::size_t, std::size_t bytes) const {
  Tensor memory;
  const std::lock_guard lock(mutex_);
  const auto status = context_->allocate_temp(tensorflow::DT_UINT8, {static_cast<std::int64_t>(bytes)}, &memory);
  if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  held_tensors_.push_back(memory);
  return static_cast<std::uint8_t*>(memory.data());
}

void GradientCall::reduced(std::size_t position, rust::Str error, rust::Box<SlotLease> lease) const noexcept {
  auto status = to_status({error.data(), error.size()});
  // The execution ended with another error. TensorFlow reports that one if this status is CANCELLED.
  if (!status.ok() && ended_->load()) status = absl::CancelledError(status.message());
  if (!status.ok() || lease->ptr() == nullptr) return answer(position, status, nullptr);
  const auto index = static_cast<int>(position);
  const Tensor& input = context_->input(index);
  if (input.NumElements() == 0) return answer(position, status, nullptr);
  tensorflow::core::RefCountPtr<tensorflow::TensorBuffer> buffer(new SlotBuffer(std::move(lease), input.TotalBytes()));
  Tensor output(input.dtype(), input.shape(), std::move(buffer));
  answer(position, status, &output);
}

void GradientCall::release() const noexcept {
  // `DeregisterCallback` would wait for the callback, in which this may run.
  if (cancellation_ != nullptr) cancellation_->TryDeregisterCallback(token_);
}

void GradientCall::answer(std::size_t position, const absl::Status& status, Tensor* output) const {
  {
    const std::lock_guard lock(mutex_);
    if (!status.ok()) context_->CtxFailure(status);
    if (output != nullptr) context_->set_output(static_cast<int>(position), *output);
    if (--pending_ > 0) return;
    held_tensors_.clear();
  }
  // `done_` may destroy the context.
  done_();
}

namespace {

class ReduceGradientsKernel final : public AsyncOpKernel {
 public:
  explicit ReduceGradientsKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    std::int64_t plan = 0;
    OP_REQUIRES_OK(construction, construction->GetAttr("plan", &plan));
    OP_REQUIRES_OK(construction, construction->GetAttr("params", &params_));
    OP_REQUIRES_OK(construction, construction->GetAttr("whole", &whole_));
    OP_REQUIRES(construction, params_.size() == static_cast<std::size_t>(construction->num_inputs()),
                absl::InvalidArgumentError("`params` must have one entry for each gradient"));
    OP_REQUIRES_OK(construction, checked([&] {
                     plan_ = std::make_unique<rust::Box<GradientPlan>>(find_plan(plan));
                     for (const auto param : params_) bytes_.push_back((*plan_)->param_bytes(param));
                   }));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    for (std::size_t i = 0; i < params_.size(); ++i) {
      const Tensor& input = context->input(static_cast<int>(i));
      OP_REQUIRES_ASYNC(
          context, input.TotalBytes() == bytes_[i],
          absl::InvalidArgumentError(absl::StrCat("the gradient of `", std::string((*plan_)->param_name(params_[i])),
                                                  "` has ", input.TotalBytes(), " bytes: expected ", bytes_[i])),
          done);
    }
    const auto call = std::make_shared<GradientCall>(context, done, **plan_, execution(context), whole_);
    OP_REQUIRES_ASYNC(context, call->watch(),
                      absl::CancelledError("the step was cancelled before its gradients were reduced"), done);
    // Backward usually produces gradients in reverse order of the parameters. In this order, the first bucket is
    // reduced while other gradients are still copied.
    for (std::size_t left = params_.size(); left > 0; --left) call->give(left - 1, params_[left - 1]);
  }

 private:
  // Identifies the execution. Several threads may call an operation with all gradients of a step in one execution, so
  // each call gets a number of its own.
  Execution execution(OpKernelContext* context) const {
    static std::atomic<std::int64_t> calls{0};
    if (whole_) return {++calls, UINT64_MAX, 0};
    const auto& frame = context->frame_iter();
    return {context->step_id(), frame.frame_id, frame.iter_id};
  }

  std::unique_ptr<rust::Box<GradientPlan>> plan_;
  std::vector<std::int64_t> params_;
  std::vector<std::size_t> bytes_;
  bool whole_ = false;
};

REGISTER_KERNEL_BUILDER(Name("SmdReduceGradients").Device(tensorflow::DEVICE_CPU), ReduceGradientsKernel);
REGISTER_KERNEL_BUILDER(Name("SmdReduceGradients").Device(tensorflow::DEVICE_GPU), ReduceGradientsKernel);

}  // namespace
}  // namespace smd::tf_ops
