// Kernels of the operations. Each describes its tensors, calls the core, and completes.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "adapter.h"
#include "collective.h"
#include "completion.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smd::tf_ops {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Returns a number that the session has for a group: this process's rank in it, or its size.
template <auto query>
class GroupKernel final : public OpKernel {
 public:
  explicit GroupKernel(OpKernelConstruction* construction) : OpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("group", &group_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    OP_REQUIRES_OK(context, checked([&] {
                     output->scalar<std::int32_t>()() =
                         static_cast<std::int32_t>(query(static_cast<std::uint64_t>(group_)));
                   }));
  }

 private:
  std::int64_t group_ = 0;
};

class SessionIdKernel final : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    OP_REQUIRES_OK(context,
                   checked([&] { output->scalar<std::int64_t>()() = static_cast<std::int64_t>(session_id()); }));
  }
};

class AllReduceKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    if (!holds(context, done, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output))) return;
    TensorOperation call = operation(context, Collective::AllReduce);
    call.read(input);
    call.write(*output);
    start(context, std::move(done), std::move(call));
  }
};

class GroupedAllReduceKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::vector<TensorOperation> calls;
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      Tensor* output = nullptr;
      if (!holds(context, done, context->forward_input_or_allocate_output({i}, i, input.shape(), &output))) return;
      calls.push_back(operation(context, Collective::AllReduce));
      calls.back().read(input);
      calls.back().write(*output);
    }
    start_batch(context, std::move(done), std::move(calls));
  }
};

class ReduceKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    std::size_t rank = 0;
    if (!holds(context, done, checked([&] { rank = group_rank(group()); }))) return;
    if (!holds(context, done, context->allocate_output(0, input.shape(), &output))) return;
    TensorOperation call = operation(context, Collective::Reduce);
    call.read(input);
    if (static_cast<std::int64_t>(rank) == root()) {
      call.write(*output);
    } else {
      const auto zeros = checked([&] { clear(describe(*output, call.place())); });
      if (!holds(context, done, zeros)) return;
      call.write_nothing(*output);
    }
    start(context, std::move(done), std::move(call));
  }
};

class BroadcastKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    std::size_t rank = 0;
    if (!holds(context, done, checked([&] { rank = group_rank(group()); }))) return;
    if (!holds(context, done, context->forward_input_or_allocate_output({0}, 0, input.shape(), &output))) return;
    TensorOperation call = operation(context, Collective::Broadcast);
    // The core broadcasts in place.
    if (static_cast<std::int64_t>(rank) == root() && !holds(context, done, copied(input, *output, call.place())))
      return;
    call.write(*output);
    start(context, std::move(done), std::move(call));
  }
};

class AllGatherKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    if (input.dims() == 0) return refuse(context, done, "a scalar has no rows to gather");
    TensorOperation call = operation(context, Collective::AllGatherRows);
    call.read(input);
    call.core.rows = {static_cast<std::size_t>(input.dim_size(0))};
    call.core.row_elems = row_elems(input.shape());
    start_rows(context, std::move(done), std::move(call), input.shape());
  }
};

// Divides dimension 0 into blocks, one for each rank: the sizes in `given`, or equal blocks if it is empty. Returns an
// error text if they do not fit.
std::string blocks(const Tensor& tensor, const Tensor& given, std::size_t ranks, std::vector<std::size_t>& rows) {
  if (tensor.dims() == 0) return "a scalar has no rows to scatter";
  const std::int64_t all = tensor.dim_size(0);
  const std::int64_t members = static_cast<std::int64_t>(ranks);
  if (given.NumElements() == 0) {
    if (all % members != 0) return absl::StrCat(all, " rows are not a multiple of the ", members, " ranks");
    rows.assign(ranks, static_cast<std::size_t>(all / members));
    return {};
  }
  const auto sizes = given.flat<std::int64_t>();
  const absl::Span<const std::int64_t> span(sizes.data(), static_cast<std::size_t>(sizes.size()));
  const std::string list = absl::StrCat("blocks of [", absl::StrJoin(span, ", "), "] rows");
  if (span.size() != ranks) return absl::StrCat(list, " for ", members, " ranks: expected one for each");
  // Subtracts sizes one by one, because their sum could overflow.
  std::int64_t left = all;
  for (const std::int64_t size : span) {
    if (size < 0) return absl::StrCat(list, ": no block has less than none");
    if (size > left) return absl::StrCat(list, " are more than the ", all, " that the tensor has");
    left -= size;
    rows.push_back(static_cast<std::size_t>(size));
  }
  if (left > 0) return absl::StrCat(list, " leave ", left, " of the ", all, " that the tensor has");
  return {};
}

class ReduceScatterKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    std::size_t ranks = 0;
    std::size_t rank = 0;
    if (!holds(context, done, checked([&] { ranks = group_size(group()), rank = group_rank(group()); }))) return;
    std::vector<std::size_t> rows;
    const std::string wrong = blocks(input, context->input(1), ranks, rows);
    if (!wrong.empty()) return refuse(context, done, wrong);
    TensorShape shape = input.shape();
    shape.set_dim(0, static_cast<std::int64_t>(rows[rank]));
    Tensor* output = nullptr;
    if (!holds(context, done, context->allocate_output(0, shape, &output))) return;
    TensorOperation call = operation(context, Collective::ReduceScatter);
    call.read_rows(input, rows);
    call.write(*output);
    start(context, std::move(done), std::move(call));
  }
};

class AllToAllKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& input = context->input(0);
    const Tensor& splits = context->input(1);
    std::size_t ranks = 0;
    if (!holds(context, done, checked([&] { ranks = group_size(group()); }))) return;
    std::vector<std::size_t> rows;
    const std::string wrong = blocks(input, splits, ranks, rows);
    if (!wrong.empty()) return refuse(context, done, wrong);
    if (splits.NumElements() == 0) return equal(context, std::move(done), rows);
    TensorOperation call = operation(context, Collective::AllToAllRows);
    call.read_rows(input, rows);
    call.core.rows = std::move(rows);
    call.core.row_elems = row_elems(input.shape());
    start_rows(context, std::move(done), std::move(call), input.shape());
  }

 private:
  // Blocks are equal on all ranks, so the output's size is known without an exchange of sizes.
  void equal(OpKernelContext* context, DoneCallback done, const std::vector<std::size_t>& rows) const {
    const Tensor& input = context->input(0);
    Tensor* output = nullptr;
    Tensor* received = nullptr;
    if (!holds(context, done, context->allocate_output(0, input.shape(), &output))) return;
    const TensorShape ranks({static_cast<std::int64_t>(rows.size())});
    if (!holds(context, done, context->allocate_output(1, ranks, &received))) return;
    std::copy(rows.begin(), rows.end(), received->flat<std::int64_t>().data());
    TensorOperation call = operation(context, Collective::AllToAll);
    call.read_rows(input, rows);
    call.write_rows(*output, rows);
    start(context, std::move(done), std::move(call));
  }
};

class BarrierKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    start(context, std::move(done), operation(context, Collective::Barrier));
  }
};

}  // namespace

#define SMD_CPU_KERNEL(name, ...) REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), __VA_ARGS__)
// Registers a kernel for the CPU and the GPU. `on_host` lists the arguments that lie in host memory on a GPU.
#define SMD_KERNEL(name, on_host, ...) \
  SMD_CPU_KERNEL(name, __VA_ARGS__);   \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU) on_host, __VA_ARGS__)

SMD_KERNEL("SmdRank", .HostMemory("rank"), GroupKernel<&group_rank>);
SMD_KERNEL("SmdSize", .HostMemory("size"), GroupKernel<&group_size>);
SMD_KERNEL("SmdSessionId", .HostMemory("id"), SessionIdKernel);
SMD_KERNEL("SmdAllReduce", , AllReduceKernel);
SMD_KERNEL("SmdGroupedAllReduce", , GroupedAllReduceKernel);
SMD_KERNEL("SmdReduce", , ReduceKernel);
SMD_KERNEL("SmdBroadcast", , BroadcastKernel);
SMD_KERNEL("SmdAllGather", .HostMemory("rows"), AllGatherKernel);
SMD_KERNEL("SmdReduceScatter", .HostMemory("rows"), ReduceScatterKernel);
SMD_KERNEL("SmdAllToAll", .HostMemory("splits").HostMemory("received"), AllToAllKernel);
SMD_CPU_KERNEL("SmdBarrier", BarrierKernel);

#undef SMD_KERNEL
#undef SMD_CPU_KERNEL

}  // namespace smd::tf_ops
