// Bodies of the ops: describe the tensors, call the core, complete.

#include <cstring>
#include <string>
#include <utility>

#include "adapter.h"
#include "completion.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// A number that the session knows.
template <class Number, auto ask>
class SessionKernel final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    OP_REQUIRES_OK(context, checked([&] { output->scalar<Number>()() = static_cast<Number>(ask()); }));
  }
};

class AllReduceKernel final : public AsyncOpKernel {
 public:
  explicit AllReduceKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("op", &op_));
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output), done);
    TensorOperation operation(Collective::AllReduce, group_);
    operation.core.op = op_;
    operation.read(input);
    operation.write(*output);
    start(context, std::move(done), std::move(operation));
  }

 private:
  std::string op_;
  std::int64_t group_ = 0;
};

class BroadcastKernel final : public AsyncOpKernel {
 public:
  explicit BroadcastKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("root", &root_));
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output), done);
    // The core broadcasts in place.
    if (output->data() != input.data()) std::memcpy(output->data(), input.data(), input.TotalBytes());
    TensorOperation operation(Collective::Broadcast, group_);
    operation.core.peer = root_;
    operation.write(*output);
    start(context, std::move(done), std::move(operation));
  }

 private:
  std::int64_t root_ = 0;
  std::int64_t group_ = 0;
};

class AllGatherKernel final : public AsyncOpKernel {
 public:
  explicit AllGatherKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    std::size_t ranks = 0;
    OP_REQUIRES_OK_ASYNC(context, checked([&] { ranks = group_size(static_cast<std::uint64_t>(group_)); }), done);
    OP_REQUIRES_ASYNC(context, input.dims() > 0, absl::InvalidArgumentError("a scalar has no rows to gather"), done);
    TensorShape shape = input.shape();
    shape.set_dim(0, shape.dim_size(0) * static_cast<std::int64_t>(ranks));
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, shape, &output), done);
    TensorOperation operation(Collective::AllGather, group_);
    operation.read(input);
    operation.write_rows(*output, ranks);
    start(context, std::move(done), std::move(operation));
  }

 private:
  std::int64_t group_ = 0;
};

}  // namespace

#define SMD_KERNEL(name, ...) REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), __VA_ARGS__)

SMD_KERNEL("SmdRank", SessionKernel<std::int32_t, &rank>);
SMD_KERNEL("SmdSize", SessionKernel<std::int32_t, &size>);
SMD_KERNEL("SmdSessionId", SessionKernel<std::int64_t, &session_id>);
SMD_KERNEL("SmdAllReduce", AllReduceKernel);
SMD_KERNEL("SmdBroadcast", BroadcastKernel);
SMD_KERNEL("SmdAllGather", AllGatherKernel);

#undef SMD_KERNEL

}  // namespace smd::tf_ops
