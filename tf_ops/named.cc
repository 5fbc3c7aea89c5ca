// Kernels of the collectives that ranks submit by name, in any order.

#include <string>
#include <utility>

#include "adapter.h"
#include "collective.h"
#include "completion.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// The base class of the collectives by name. If a call is invalid, the other ranks need not be told: none of their
// operations waits for it before the session ends.
class NamedKernel : public CollectiveKernel {
 public:
  explicit NamedKernel(OpKernelConstruction* construction) : CollectiveKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("tensor_name", &tensor_name_));
    OP_REQUIRES_OK(construction, construction->GetAttr("blocking", &blocking_));
  }

 protected:
  void start(OpKernelContext* context, DoneCallback done, TensorOperation call) const {
    start_named(context, std::move(done), std::move(call), tensor_name_, context->input(0).shape(), blocking_);
  }

 private:
  std::string tensor_name_;
  bool blocking_ = false;
};

class NamedAllReduceKernel final : public NamedKernel {
 public:
  using NamedKernel::NamedKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output), done);
    TensorOperation call = operation(context, Collective::AllReduce);
    call.read(input);
    call.write(*output);
    start(context, std::move(done), std::move(call));
  }
};

class NamedBroadcastKernel final : public NamedKernel {
 public:
  using NamedKernel::NamedKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output), done);
    TensorOperation call = operation(context, Collective::Broadcast);
    // The core broadcasts in place. It reports a root outside of the group on all ranks.
    OP_REQUIRES_OK_ASYNC(context, copied(input, *output, call.place()), done);
    call.write(*output);
    start(context, std::move(done), std::move(call));
  }
};

}  // namespace

#define SMD_NAMED_KERNEL(name, kernel)                                        \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel); \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("anchors"), kernel)

SMD_NAMED_KERNEL("SmdNamedAllReduce", NamedAllReduceKernel);
SMD_NAMED_KERNEL("SmdNamedBroadcast", NamedBroadcastKernel);

#undef SMD_NAMED_KERNEL

}  // namespace smd::tf_ops
