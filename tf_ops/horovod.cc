// Kernels of Horovod's operations. Each describes its tensors, submits the collectives by name, and completes.
//
// - HVD-1: a call that this rank cannot make fails at once, and the other ranks are not told. A call that fails later
//   fails on all ranks. In both cases the name may be used again.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "adapter.h"
#include "completion.h"
#include "status.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace smd::tf_ops {
namespace horovod {

using tensorflow::AsyncOpKernel;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Thrown where a call is invalid.
struct InvalidCall {
  absl::Status status;
};

static void must(const absl::Status& status) {
  if (!status.ok()) throw InvalidCall{status};
}

static void must(bool holds, const std::string& otherwise) {
  if (!holds) throw InvalidCall{absl::InvalidArgumentError(otherwise)};
}

// Runs `body`, which may call the core and `must`, and returns its status.
template <class Body>
absl::Status attempted(Body&& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const InvalidCall& call) {
    return call.status;
  } catch (const rust::Error& error) {
    return to_horovod_status(error.what(), false);
  }
}

// The collectives of one call, and the destinations of their results.
struct Group {
  std::vector<TensorOperation> operations;
  // The shape of each tensor; ranks compare them.
  std::vector<std::vector<std::uint64_t>> shapes;
  // For each operation on rows: the output's shape, except for the number of rows.
  std::vector<TensorShape> likes;
  // Whether the numbers of received rows are an output, too.
  bool tells_rows = false;
  // Runs after success, before the kernel completes.
  std::function<void()> finish = [] {};

  void add(TensorOperation operation, const TensorShape& shape) {
    operations.push_back(std::move(operation));
    const auto sizes = shape.dim_sizes();
    shapes.emplace_back(sizes.begin(), sizes.end());
  }
};

class GroupCompletion : public Completion {
 public:
  GroupCompletion(OpKernelContext* context, AsyncOpKernel::DoneCallback done, Group group)
      : context_(context), done_(std::move(done)), group_(std::move(group)) {}

  void done(rust::Str error, std::int64_t last) noexcept override {
    if (error.empty()) {
      succeeded(last);
    } else {
      context_->CtxFailure(to_horovod_status({error.data(), error.size()}, true));
    }
    group_.operations.clear();
    finish(context_, std::move(done_));
  }

  // The core calls this for one operation after the other, in their order.
  void make_outputs(rust::Slice<const std::size_t> rows, rust::Vec<TensorView>& outputs) override {
    if (next_ >= group_.likes.size())
      throw std::logic_error("the core requested the outputs of more operations than were submitted");
    TensorShape& shape = group_.likes[next_];
    TensorOperation& operation = group_.operations[next_];
    const std::vector<std::size_t> heights(rows.begin(), rows.end());
    check(shape.SetDimWithStatus(0, std::accumulate(heights.begin(), heights.end(), std::int64_t{0})));
    Tensor* output = nullptr;
    check(context_->allocate_output(static_cast<int>(next_++), shape, &output));
    operation.write_rows(*output, heights);
    if (group_.tells_rows) {
      Tensor* counts = nullptr;
      check(context_->allocate_output(1, TensorShape({static_cast<std::int64_t>(heights.size())}), &counts));
      std::copy(heights.begin(), heights.end(), counts->flat<std::int32_t>().data());
    }
    for (const TensorView& view : operation.core.outputs) outputs.push_back(view);
  }

 protected:
  virtual void succeeded(std::int64_t) { group_.finish(); }

  OpKernelContext* context() const { return context_; }

 private:
  static void check(const absl::Status& status) {
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }

  OpKernelContext* context_;
  AsyncOpKernel::DoneCallback done_;
  Group group_;
  std::size_t next_ = 0;
};

// The core's name of the reduction with Horovod's number `number`.
static std::string reduction(int number) {
  static const char* const kNames[] = {"average", "sum", "adasum", "min", "max", "product"};
  must(number >= 0 && number < 6,
       absl::StrCat(number, " is not a reduction: expected Average, Sum, Adasum, Min, Max or Product"));
  return kNames[number];
}

// A kernel with a name: the node's, or one that an eager caller passes; such a caller blocks until completion.
class NamedKernel : public AsyncOpKernel {
 public:
  explicit NamedKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    std::string tensor_name;
    bool ignore_name_scope = false;
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set_id", &process_set_));
    OP_REQUIRES_OK(construction, construction->GetAttr("tensor_name", &tensor_name));
    OP_REQUIRES_OK(construction, construction->GetAttr("ignore_name_scope", &ignore_name_scope));
    blocking_ = !tensor_name.empty();
    name_ = blocking_ ? tensor_name : name();
    if (ignore_name_scope) name_ = name_.substr(name_.rfind('/') + 1);
  }

 protected:
  std::int64_t process_set() const { return process_set_; }
  rust::Str operation_name() const { return {name_.data(), name_.size()}; }
  bool is_blocking() const { return blocking_; }

 private:
  std::int64_t process_set_ = 0;
  bool blocking_ = false;
  std::string name_;
};

// The base class of the collectives: reads their attributes and submits them.
class CollectiveKernel : public NamedKernel {
 public:
  explicit CollectiveKernel(OpKernelConstruction* construction) : NamedKernel(construction) {
    float prescale = 1.0F;
    float postscale = 1.0F;
    if (construction->HasAttr("reduce_op")) {
      OP_REQUIRES_OK(construction, construction->GetAttr("reduce_op", &reduce_op_));
      OP_REQUIRES_OK(construction, construction->GetAttr("prescale_factor", &prescale));
      OP_REQUIRES_OK(construction, construction->GetAttr("postscale_factor", &postscale));
      OP_REQUIRES_OK(construction, construction->GetAttr("is_scaled", &is_scaled_));
    }
    if (construction->HasAttr("root_rank")) OP_REQUIRES_OK(construction, construction->GetAttr("root_rank", &root_));
    prescale_ = prescale;
    postscale_ = postscale;
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) final {
    Group group;
    const absl::Status status = attempted([&] {
      const std::uint64_t number = process_set_group(process_set());
      fill(context, static_cast<std::int64_t>(number), group);
      ask_for(context, done, std::move(group));
    });
    OP_REQUIRES_OK_ASYNC(context, status, done);
  }

 protected:
  // Adds the collectives to `operations`. May throw what `attempted` catches.
  virtual void fill(OpKernelContext* context, std::int64_t group, Group& operations) = 0;

  int reduce_op() const { return reduce_op_; }
  // The root's rank inside the group.
  std::int64_t root() const { return static_cast<std::int64_t>(process_set_root(process_set(), root_)); }

 private:
  void ask_for(OpKernelContext* context, const DoneCallback& done, Group group) const {
    // The core reads the descriptions after the operations have moved into the completion.
    std::vector<Operation> cores;
    std::vector<std::size_t> num_dims;
    std::vector<std::uint64_t> dims;
    for (const auto& operation : group.operations) cores.push_back(operation.core);
    for (const auto& shape : group.shapes) {
      num_dims.push_back(shape.size());
      dims.insert(dims.end(), shape.begin(), shape.end());
    }
    std::vector<Call> calls;
    for (const auto& core : cores) calls.push_back(core.call());
    NamedCall named;
    named.name = operation_name();
    named.shared = false;
    named.prescale = prescale_;
    named.postscale = postscale_;
    named.is_scaled = is_scaled_;
    named.blocking = is_blocking();
    named.num_dims = {num_dims.data(), num_dims.size()};
    named.dims = {dims.data(), dims.size()};
    submit_group_named(named, {calls.data(), calls.size()},
                       std::make_unique<GroupCompletion>(context, done, std::move(group)));
  }

  std::int64_t root_ = 0;
  int reduce_op_ = 0;
  double prescale_ = 1.0;
  double postscale_ = 1.0;
  bool is_scaled_ = false;
};

// All-reduces one tensor or several.
class AllreduceKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      Tensor* output = nullptr;
      must(context->forward_input_or_allocate_output({i}, i, input.shape(), &output));
      TensorOperation operation(Collective::AllReduce, group, place_of(context));
      operation.core.op = reduction(reduce_op());
      operation.read(input);
      operation.write(*output);
      operations.add(std::move(operation), input.shape());
    }
  }
};

class AllgatherKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      must(input.dims() > 0, absl::StrCat("`", name(), "`: allgather of a rank-zero tensor: it has no rows"));
      TensorOperation operation(Collective::AllGatherRows, group, place_of(context));
      operation.read(input);
      operation.core.rows = {static_cast<std::size_t>(input.dim_size(0))};
      operation.core.row_elems = row_elems(input.shape());
      operations.likes.push_back(input.shape());
      operations.add(std::move(operation), input.shape());
    }
  }
};

class BroadcastKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    const Tensor& input = context->input(0);
    TensorOperation operation(Collective::Broadcast, group, place_of(context));
    operation.core.peer = root();
    Tensor* output = nullptr;
    must(context->forward_input_or_allocate_output({0}, 0, input.shape(), &output));
    // The core broadcasts in place.
    if (output->data() != input.data()) copy(describe(input, operation.place()), describe(*output, operation.place()));
    operation.write(*output);
    operations.add(std::move(operation), input.shape());
  }
};

// Broadcasts resource variables. A reader may share a variable's tensor, so the variable gets a new tensor instead of
// new contents.
class BroadcastInplaceResourceKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    const std::int64_t root_place = root();
    const bool is_root = static_cast<std::int64_t>(group_rank(static_cast<std::uint64_t>(group))) == root_place;
    std::vector<std::pair<tensorflow::core::RefCountPtr<tensorflow::Var>, Tensor>> received;
    for (int i = 0; i < context->num_inputs(); ++i) {
      tensorflow::core::RefCountPtr<tensorflow::Var> variable;
      must(tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, i), &variable));
      Tensor values;
      {
        const tensorflow::tf_shared_lock lock(*variable->mu());
        values = *variable->tensor();
      }
      must(variable->is_initialized, absl::StrCat("`", name(), "`: variable ", i, " is not initialized"));
      if (!is_root) must(context->allocate_temp(values.dtype(), values.shape(), &values));
      TensorOperation operation(Collective::Broadcast, group, place_of(context));
      operation.core.peer = root_place;
      operation.write(values);
      operations.add(std::move(operation), values.shape());
      if (!is_root) received.emplace_back(std::move(variable), std::move(values));
    }
    // `std::function` must be copyable, and the tensors' owner is not.
    auto assigned = std::make_shared<decltype(received)>(std::move(received));
    operations.finish = [assigned] {
      for (auto& [variable, values] : *assigned) {
        const tensorflow::mutex_lock lock(*variable->mu());
        *variable->tensor() = values;
      }
    };
  }
};

// Broadcasts reference variables of TensorFlow 1 in place.
class BroadcastInplaceKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor values = context->mutable_input(i, false);
      must(values.IsInitialized(), absl::StrCat("`", name(), "`: variable ", i, " is not initialized"));
      context->forward_ref_input_to_ref_output(i, i);
      TensorOperation operation(Collective::Broadcast, group, place_of(context));
      operation.core.peer = root();
      operation.write(values);
      operations.add(std::move(operation), values.shape());
    }
  }
};

class AlltoallKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    const Tensor& input = context->input(0);
    must(input.dims() > 0, absl::StrCat("`", name(), "`: alltoall of a rank-zero tensor: it has no rows"));
    const std::vector<std::size_t> rows =
        rows_of(context->input(1), input.dim_size(0), group_size(static_cast<std::uint64_t>(group)));
    const std::int64_t sent = static_cast<std::int64_t>(std::accumulate(rows.begin(), rows.end(), std::size_t{0}));
    TensorOperation operation(Collective::AllToAllRows, group, place_of(context));
    operation.read_rows(sent == input.dim_size(0) ? input : input.Slice(0, sent), rows);
    operation.core.rows = rows;
    operation.core.row_elems = row_elems(input.shape());
    operations.likes.push_back(input.shape());
    operations.tells_rows = true;
    operations.add(std::move(operation), input.shape());
  }

 private:
  // The number of rows for each rank.
  std::vector<std::size_t> rows_of(const Tensor& splits, std::int64_t height, std::size_t num_ranks) const {
    const auto ranks = static_cast<std::int64_t>(num_ranks);
    must(splits.dims() == 1, absl::StrCat("`", name(), "`: alltoall expects a 1D splits tensor, not one of ",
                                          splits.dims(), " dimensions"));
    if (splits.NumElements() == 0) {
      must(height % ranks == 0,
           absl::StrCat("`", name(), "`: the first dimension, ", height,
                        ", is not an even multiple of the number of workers, ", ranks, ", and there are no splits"));
      return std::vector<std::size_t>(num_ranks, static_cast<std::size_t>(height / ranks));
    }
    const auto sizes = splits.vec<std::int32_t>();
    const std::vector<std::int64_t> given(sizes.data(), sizes.data() + sizes.size());
    const std::string list = absl::StrCat("[", absl::StrJoin(given, ", "), "]");
    must(static_cast<std::int64_t>(given.size()) == ranks,
         absl::StrCat("`", name(), "`: the number of splits, ", given.size(), ", does not equal number of workers, ",
                      ranks));
    must(std::all_of(given.begin(), given.end(), [](std::int64_t size) { return size >= 0; }),
         absl::StrCat("`", name(), "`: splits ", list, " must not be negative"));
    must(std::accumulate(given.begin(), given.end(), std::int64_t{0}) <= height,
         absl::StrCat("`", name(), "`: the sum of splits ", list, " is greater than the first dimension, ", height));
    return {given.begin(), given.end()};
  }
};

// Reduce-scatters one tensor or several. Rows are divided evenly; the first ranks get one more row each where the
// division leaves a remainder.
class ReducescatterKernel final : public CollectiveKernel {
 public:
  using CollectiveKernel::CollectiveKernel;

 protected:
  void fill(OpKernelContext* context, std::int64_t group, Group& operations) override {
    const std::string op = reduction(reduce_op());
    if (op != "average" && op != "sum") {
      throw InvalidCall{absl::AbortedError(
          absl::StrCat("`", name(), "`: reducescatter currently only supports AVERAGE and SUM, not ", op))};
    }
    const auto number = static_cast<std::uint64_t>(group);
    const auto ranks = static_cast<std::int64_t>(group_size(number));
    const std::size_t rank = group_rank(number);
    for (int i = 0; i < context->num_inputs(); ++i) {
      const Tensor& input = context->input(i);
      must(input.dims() > 0, absl::StrCat("`", name(), "`: reducescatter does not support scalar inputs"));
      const std::int64_t height = input.dim_size(0);
      std::vector<std::size_t> rows;
      for (std::int64_t other = 0; other < ranks; ++other) {
        rows.push_back(static_cast<std::size_t>(height / ranks + (other < height % ranks ? 1 : 0)));
      }
      TensorShape shape = input.shape();
      shape.set_dim(0, static_cast<std::int64_t>(rows[rank]));
      Tensor* output = nullptr;
      must(context->allocate_output(i, shape, &output));
      TensorOperation operation(Collective::ReduceScatter, group, place_of(context));
      operation.core.op = op;
      operation.read_rows(input, rows);
      operation.write(*output);
      operations.add(std::move(operation), input.shape());
    }
  }
};

class BarrierKernel final : public AsyncOpKernel {
 public:
  explicit BarrierKernel(OpKernelConstruction* construction) : AsyncOpKernel(construction) {
    OP_REQUIRES_OK(construction, construction->GetAttr("process_set_id", &process_set_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const absl::Status status = attempted([&] {
      Operation core;
      core.collective = Collective::Barrier;
      core.group = process_set_group(process_set_);
      const Call call = core.call();
      const std::size_t num_dims = 0;
      NamedCall named;
      named.kind = "barrier";
      named.name = "noname";
      named.shared = true;
      named.prescale = 1.0;
      named.postscale = 1.0;
      named.is_scaled = false;
      named.blocking = true;
      named.num_dims = {&num_dims, 1};
      submit_group_named(named, {&call, 1}, std::make_unique<GroupCompletion>(context, done, Group()));
    });
    OP_REQUIRES_OK_ASYNC(context, status, done);
  }

 private:
  std::int64_t process_set_ = 0;
};

class StepKernel final : public NamedKernel {
 public:
  explicit StepKernel(OpKernelConstruction* construction) : NamedKernel(construction) {
    std::vector<std::int64_t> numbers;
    OP_REQUIRES_OK(construction, construction->GetAttr("numbers", &numbers));
    OP_REQUIRES_OK(construction, construction->GetAttr("names", &names_));
    numbers_.assign(numbers.begin(), numbers.end());
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const absl::Status status = attempted([&] {
      StepGradients gradients;
      gradients.names = rust::Str(names_.data(), names_.size());
      gradients.numbers = {numbers_.data(), numbers_.size()};
      gradients.is_last = false;
      compare_gradients(process_set_group(process_set()), operation_name(), gradients, is_blocking(),
                        std::make_unique<GroupCompletion>(context, done, Group()));
    });
    OP_REQUIRES_OK_ASYNC(context, status, done);
  }

 private:
  std::vector<std::uint64_t> numbers_;
  std::string names_;
};

class JoinCompletion final : public GroupCompletion {
 public:
  using GroupCompletion::GroupCompletion;

 private:
  void succeeded(std::int64_t last) override {
    Tensor* output = nullptr;
    const absl::Status status = context()->allocate_output(0, TensorShape({}), &output);
    if (!status.ok()) return context()->CtxFailure(status);
    output->scalar<std::int32_t>()() = static_cast<std::int32_t>(last);
  }
};

class JoinKernel final : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const absl::Status status = attempted(
        [&] { join_named(process_set_group(0), -1, -1, std::make_unique<JoinCompletion>(context, done, Group())); });
    OP_REQUIRES_OK_ASYNC(context, status, done);
  }
};

// Returns a number such as the rank or size, read when the operation runs, because an elastic job may change it.
template <auto query>
class NumberKernel final : public OpKernel {
 public:
  explicit NumberKernel(OpKernelConstruction* construction) : OpKernel(construction) {
    if (construction->HasAttr("process_set_id")) {
      OP_REQUIRES_OK(construction, construction->GetAttr("process_set_id", &process_set_));
    }
  }

  void Compute(OpKernelContext* context) override {
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &output));
    OP_REQUIRES_OK(
        context, attempted([&] { output->scalar<std::int32_t>()() = static_cast<std::int32_t>(query(process_set_)); }));
  }

 private:
  std::int64_t process_set_ = 0;
};

static std::size_t ranks_of(std::int64_t process_set) { return process_set_ranks(process_set).size(); }

static std::size_t is_included(std::int64_t process_set) {
  const auto ranks = process_set_ranks(process_set);
  return std::count(ranks.begin(), ranks.end(), ranks_and_sizes().rank) > 0 ? 1 : 0;
}

static std::size_t world_rank(std::int64_t) { return ranks_and_sizes().rank; }
static std::size_t local_rank(std::int64_t) { return ranks_and_sizes().local_rank; }
static std::size_t local_size(std::int64_t) { return ranks_and_sizes().local_size; }

#define SMD_CPU_KERNEL(name, ...) REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), __VA_ARGS__)
// Registers a kernel for the CPU and the GPU. `on_host` lists the arguments that lie in host memory on a GPU.
#define SMD_KERNEL(name, on_host, ...) \
  SMD_CPU_KERNEL(name, __VA_ARGS__);   \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU) on_host, __VA_ARGS__)

SMD_KERNEL("HorovodAllreduce", , AllreduceKernel);
SMD_KERNEL("HorovodGroupedAllreduce", , AllreduceKernel);
SMD_KERNEL("HorovodAllgather", , AllgatherKernel);
SMD_KERNEL("HorovodGroupedAllgather", , AllgatherKernel);
SMD_KERNEL("HorovodBroadcast", , BroadcastKernel);
SMD_KERNEL("HorovodBroadcastInplace", , BroadcastInplaceKernel);
SMD_KERNEL("HorovodBroadcastInplaceResource", .HostMemory("resources"), BroadcastInplaceResourceKernel);
SMD_KERNEL("HorovodAlltoall", .HostMemory("splits").HostMemory("received_splits"), AlltoallKernel);
SMD_KERNEL("HorovodReducescatter", , ReducescatterKernel);
SMD_KERNEL("HorovodGroupedReducescatter", , ReducescatterKernel);
SMD_CPU_KERNEL("HorovodBarrier", BarrierKernel);
SMD_KERNEL("HorovodStep", , StepKernel);
SMD_KERNEL("HorovodJoin", .HostMemory("output"), JoinKernel);
SMD_KERNEL("HorovodSize", .HostMemory("size"), NumberKernel<&ranks_of>);
SMD_KERNEL("HorovodProcessSetIncluded", .HostMemory("included"), NumberKernel<&is_included>);
SMD_KERNEL("HorovodRank", .HostMemory("rank"), NumberKernel<&world_rank>);
SMD_KERNEL("HorovodLocalRank", .HostMemory("local_rank"), NumberKernel<&local_rank>);
SMD_KERNEL("HorovodLocalSize", .HostMemory("local_size"), NumberKernel<&local_size>);

#undef SMD_KERNEL
#undef SMD_CPU_KERNEL

}  // namespace horovod
}  // namespace smd::tf_ops
