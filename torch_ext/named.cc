#include "named.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>

#include "boxed.h"
#include "completion.h"
#include "device.h"
#include "smd/exposed_time.h"
#include "status.h"

namespace smd::torch_ext {

// A namespace of their own, because the ordered collectives have the same names.
namespace named {

using NamedWorkPtr = c10::intrusive_ptr<NamedWork>;

// The interval at which a wait looks for signals. Ctrl-C ends the wait but not the operation.
constexpr std::chrono::milliseconds kLookForSignals(50);

// The last arguments of every operation by name.
struct NamedOptions {
  std::string kind;
  std::string name;
  bool blocking;
  double prescale = 1.0;
  double postscale = 1.0;
  // The caller applies the factors itself; ranks only compare them.
  bool is_scaled = false;
  // Other operations of this process may have the name, too; they run one after the other.
  bool shared = false;
};

// The row shape and type of an output, and the stream in which it is allocated: the one that was current in the caller.
// A tensor is not kept, because it may belong to Python.
struct RowsOutput {
  explicit RowsOutput(const at::Tensor& like) : shape(like.sizes().vec()), options(like.options()) {
    if (like.is_cuda()) stream = current_stream(like.device());
  }

  at::Tensor allocate(int64_t height) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    shape[0] = height;
    return at::empty(shape, options);
  }

  std::vector<int64_t> shape;
  at::TensorOptions options;
  std::optional<c10::Stream> stream;
};

// The operations of one call, and the destinations of their results.
struct Group {
  std::vector<TensorOperation> operations;
  std::vector<at::Tensor> results;
  // The shape of each tensor; ranks compare them.
  std::vector<std::vector<std::uint64_t>> shapes;
  // For each operation on rows: its output, which is allocated when the number of rows is known.
  std::vector<RowsOutput> likes;
  // Whether the numbers of received rows are a result, too.
  bool tells_rows = false;

  void add(TensorOperation operation, at::IntArrayRef shape) {
    operations.push_back(std::move(operation));
    shapes.emplace_back(shape.begin(), shape.end());
  }
};

class GroupCompletion final : public Completion {
 public:
  GroupCompletion(NamedWorkPtr work, Group group) : work_(std::move(work)), group_(std::move(group)) {}

  void done(rust::Str error, std::int64_t source) noexcept override {
    std::string text(error.data(), error.size());
    for (const auto& operation : group_.operations) {
      if (text.empty()) text = copy_back(operation);
    }
    group_.operations.clear();
    work_->complete(std::move(text), std::move(group_.results), source);
  }

  // The core calls this for one operation after the other, in their order.
  void make_outputs(rust::Slice<const std::size_t> rows, rust::Vec<TensorView>& outputs) override {
    if (next_ >= group_.likes.size())
      throw std::logic_error("the core requested the outputs of more operations than were submitted");
    auto& like = group_.likes[next_];
    auto& operation = group_.operations[next_++];
    const std::vector<int64_t> heights(rows.begin(), rows.end());
    std::optional<StreamScope> scope;
    if (like.stream) scope.emplace(*like.stream);
    const auto output = like.allocate(std::accumulate(heights.begin(), heights.end(), int64_t{0}));
    operation.write_rows(output, heights);
    group_.results.push_back(output);
    if (group_.tells_rows) group_.results.push_back(at::tensor(heights, at::kInt));
    for (const auto& view : operation.core.outputs) outputs.push_back(view);
  }

 private:
  NamedWorkPtr work_;
  Group group_;
  std::size_t next_ = 0;
};

static NamedWorkPtr start(const NamedOptions& options, Group group) {
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
  named.kind = options.kind;
  named.name = options.name;
  named.shared = options.shared;
  named.prescale = options.prescale;
  named.postscale = options.postscale;
  named.is_scaled = options.is_scaled;
  named.blocking = options.blocking;
  named.num_dims = {num_dims.data(), num_dims.size()};
  named.dims = {dims.data(), dims.size()};
  auto work = c10::make_intrusive<NamedWork>();
  work->set_handle(submit_group_named(named, {calls.data(), calls.size()},
                                      std::make_unique<GroupCompletion>(work, std::move(group))));
  return work;
}

// If `outputs` is not empty, it equals `inputs`, and the operation is in place.
static NamedWorkPtr all_reduce(at::TensorList inputs, at::TensorList outputs, std::string op, double prescale,
                               double postscale, bool is_scaled, std::string kind, std::string name,
                               int64_t process_set, bool blocking) {
  return checked([&] {
    const auto number = static_cast<int64_t>(process_set_group(process_set));
    Group group;
    for (const auto& input : inputs) {
      TensorOperation operation(Collective::AllReduce, number);
      operation.core.op = op;
      if (outputs.empty()) {
        group.results.push_back(at::empty(input.sizes(), input.options()));
        operation.write(group.results.back());
        operation.read(input);
      } else {
        operation.update(input);
      }
      group.add(std::move(operation), input.sizes());
    }
    return start({std::move(kind), std::move(name), blocking, prescale, postscale, is_scaled}, std::move(group));
  });
}

static NamedWorkPtr broadcast(const at::Tensor& input, at::TensorList outputs, int64_t root, std::string kind,
                              std::string name, int64_t process_set, bool blocking) {
  return checked([&] {
    TensorOperation operation(Collective::Broadcast, static_cast<int64_t>(process_set_group(process_set)));
    operation.core.peer = static_cast<int64_t>(process_set_root(process_set, root));
    Group group;
    if (outputs.empty()) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      group.results.push_back(input.clone(at::MemoryFormat::Contiguous));
      operation.update(group.results.back());
    } else {
      operation.update(outputs[0]);
    }
    group.add(std::move(operation), input.sizes());
    return start({std::move(kind), std::move(name), blocking}, std::move(group));
  });
}

static std::size_t row_elems(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return static_cast<std::size_t>(c10::multiply_integers(sizes.begin() + 1, sizes.end()));
}

static void must_have_rows(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, what,
                    " of a rank-zero tensor: it has no rows, and does not support scalar inputs");
}

static NamedWorkPtr all_gather(at::TensorList inputs, std::string kind, std::string name, int64_t process_set,
                               bool blocking) {
  return checked([&] {
    const auto number = static_cast<int64_t>(process_set_group(process_set));
    Group group;
    for (const auto& input : inputs) {
      must_have_rows(input, "allgather");
      TensorOperation operation(Collective::AllGatherRows, number);
      operation.read(input);
      operation.core.rows = {static_cast<std::size_t>(input.size(0))};
      operation.core.row_elems = row_elems(input);
      group.likes.emplace_back(input);
      group.add(std::move(operation), input.sizes());
    }
    return start({std::move(kind), std::move(name), blocking}, std::move(group));
  });
}

// Without `splits`, dimension 0 is divided into equal blocks.
static NamedWorkPtr all_to_all(const at::Tensor& input, std::optional<at::IntArrayRef> splits, std::string kind,
                               std::string name, int64_t process_set, bool blocking) {
  return checked([&] {
    must_have_rows(input, "alltoall");
    const std::uint64_t number = process_set_group(process_set);
    const auto ranks = static_cast<int64_t>(group_size(number));
    const int64_t height = input.size(0);
    std::vector<int64_t> rows;
    if (splits) {
      rows = splits->vec();
      TORCH_CHECK_VALUE(static_cast<int64_t>(rows.size()) == ranks, "alltoall: the number of splits, ", rows.size(),
                        ", does not equal number of workers, ", ranks);
      int64_t sum = 0;
      for (const int64_t size : rows) {
        TORCH_CHECK_VALUE(size >= 0, "alltoall: splits ", rows, " must not be negative");
        sum += size;
      }
      TORCH_CHECK_VALUE(sum <= height, "alltoall: the sum of splits ", rows, " is greater than the first dimension, ",
                        height);
    } else {
      TORCH_CHECK_VALUE(height % ranks == 0, "alltoall: the first dimension, ", height,
                        ", is not an even multiple of the number of workers, ", ranks, ", and there are no splits");
      rows.assign(static_cast<std::size_t>(ranks), height / ranks);
    }
    TensorOperation operation(Collective::AllToAllRows, static_cast<int64_t>(number));
    const int64_t sent = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      operation.read_rows(sent == height ? input : input.narrow(0, 0, sent), rows);
    }
    operation.core.rows.assign(rows.begin(), rows.end());
    operation.core.row_elems = row_elems(input);
    Group group;
    group.likes.emplace_back(input);
    group.tells_rows = true;
    group.add(std::move(operation), input.sizes());
    return start({std::move(kind), std::move(name), blocking}, std::move(group));
  });
}

// Rows are divided evenly; the first ranks get one more row each where the division leaves a remainder.
static NamedWorkPtr reduce_scatter(at::TensorList inputs, std::string op, double prescale, double postscale,
                                   bool is_scaled, std::string kind, std::string name, int64_t process_set,
                                   bool blocking) {
  return checked([&] {
    const std::uint64_t number = process_set_group(process_set);
    const auto ranks = static_cast<int64_t>(group_size(number));
    Group group;
    for (const auto& input : inputs) {
      must_have_rows(input, "reducescatter");
      std::vector<int64_t> rows;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        rows.push_back(input.size(0) / ranks + (rank < input.size(0) % ranks ? 1 : 0));
      }
      auto shape = input.sizes().vec();
      shape[0] = rows[group_rank(number)];
      TensorOperation operation(Collective::ReduceScatter, static_cast<int64_t>(number));
      operation.core.op = op;
      group.results.push_back(at::empty(shape, input.options()));
      operation.write(group.results.back());
      operation.read_rows(input, rows);
      group.add(std::move(operation), input.sizes());
    }
    return start({std::move(kind), std::move(name), blocking, prescale, postscale, is_scaled}, std::move(group));
  });
}

static NamedWorkPtr barrier(std::string kind, int64_t process_set) {
  return checked([&] {
    Group group;
    group.add({Collective::Barrier, static_cast<int64_t>(process_set_group(process_set))}, {});
    NamedOptions options{std::move(kind), "noname", true};
    options.shared = true;
    return start(options, std::move(group));
  });
}

// Compares across ranks which gradients a step has. `names` has one name in each line.
static NamedWorkPtr step(std::string_view name, std::string_view names, int64_t process_set) {
  return checked([&] {
    StepGradients gradients;
    gradients.names = rust::Str(names.data(), names.size());
    gradients.is_last = true;
    auto work = c10::make_intrusive<NamedWork>();
    work->set_handle(compare_gradients(process_set_group(process_set), rust::Str(name.data(), name.size()), gradients,
                                       false, std::make_unique<GroupCompletion>(work, Group())));
    return work;
  });
}

static NamedWorkPtr join(int64_t named, int64_t current) {
  return checked([&] {
    auto work = c10::make_intrusive<NamedWork>();
    join_named(process_set_group(0), named, current, std::make_unique<GroupCompletion>(work, Group()));
    return work;
  });
}

}  // namespace named

void NamedWork::wait() {
  const ExposedTime exposed;
  while (!is_completed()) {
    if (!drive()) {
      std::unique_lock lock(mutex_);
      completed_.wait_for(lock, named::kLookForSignals, [this] { return done_; });
    }
    if (is_completed()) break;
    // Without the mutex, because this may take Python's lock.
    checked([] { check_interrupt("wait for a collective with a name"); });
  }
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) throw_report(error_);
}

// Without the mutex, because this thread may complete the operation itself.
bool NamedWork::drive() {
  std::unique_lock lock(mutex_);
  const auto handle = handle_;
  lock.unlock();
  return handle && (*handle)->drive();
}

bool NamedWork::is_completed() {
  const std::lock_guard lock(mutex_);
  return done_;
}

std::vector<at::Tensor> NamedWork::results() {
  const std::lock_guard lock(mutex_);
  return results_;
}

std::int64_t NamedWork::last() {
  const std::lock_guard lock(mutex_);
  return last_;
}

void NamedWork::set_handle(rust::Box<NamedHandle> handle) {
  const std::lock_guard lock(mutex_);
  if (!done_) handle_ = std::make_shared<rust::Box<NamedHandle>>(std::move(handle));
}

void NamedWork::complete(std::string error, std::vector<at::Tensor> results, std::int64_t last) noexcept {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    handle_ = nullptr;
    error_ = std::move(error);
    results_ = std::move(results);
    last_ = last;
  }
  completed_.notify_all();
}

TORCH_LIBRARY_IMPL(smd, CompositeExplicitAutograd, m) {
  m.impl("named_all_reduce", boxed<&named::all_reduce>());
  m.impl("named_broadcast", boxed<&named::broadcast>());
  m.impl("named_all_gather", boxed<&named::all_gather>());
  m.impl("named_all_to_all", boxed<&named::all_to_all>());
  m.impl("named_reduce_scatter", boxed<&named::reduce_scatter>());
  m.impl("named_barrier", boxed<&named::barrier>());
  m.impl("named_step", boxed<&named::step>());
  m.impl("named_join", boxed<&named::join>());
}

}  // namespace smd::torch_ext
