#include "c10d/backend.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "boxed.h"
#include "compat.h"
#include "completion.h"
#include "smd/status.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

using c10d::kUnsetTimeout;
using c10d::OpType;
using Milliseconds = std::chrono::milliseconds;

// Runs `body` and removes the C++ stack trace that c10's errors have in `what()`.
template <class Body>
auto plainly(Body&& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    throw std::runtime_error(error.what_without_backtrace());
  }
}

class C10dStore final : public BootstrapStore {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(rust::Str key, rust::Slice<const std::uint8_t> value) const override {
    plainly([&] { store_->set(std::string(key), std::vector<std::uint8_t>(value.begin(), value.end())); });
  }

  bool get(rust::Str key, rust::Vec<std::uint8_t>& value) const override {
    return plainly([&] {
      const std::string name(key);
      if (!store_->check({name})) return false;
      for (const auto byte : store_->get(name)) value.push_back(byte);
      return true;
    });
  }

  void remove(rust::Str key) const override {
    plainly([&] { store_->deleteKey(std::string(key)); });
  }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
};

const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, " takes one tensor, not ", tensors.size());
  return tensors[0];
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1, what, " takes one list of tensors, not ", lists.size());
  return lists[0];
}

std::string name_of(const c10d::ReduceOp& op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "average";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    case c10d::ReduceOp::BAND:
      return "bit_and";
    case c10d::ReduceOp::BOR:
      return "bit_or";
    case c10d::ReduceOp::BXOR:
      return "bit_xor";
    default:
      TORCH_CHECK_VALUE(false, "reduction ", static_cast<int>(op.op_), " is not one that `smddp` knows");
  }
}

// The tensor that a rank contributes: for PREMUL_SUM the product with its factor, otherwise the tensor itself.
at::Tensor contribution(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op != c10d::ReduceOp::PREMUL_SUM) return tensor;
  const auto& factor = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
  const c10::NoGradGuard no_grad;
  if (factor.tensor_factor.defined()) return tensor * factor.tensor_factor.to(tensor.scalar_type());
  return tensor * factor.double_factor;
}

// The same in place.
const at::Tensor& contribute(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op == c10d::ReduceOp::PREMUL_SUM) {
    const c10::NoGradGuard no_grad;
    tensor.copy_(contribution(tensor, op));
  }
  return tensor;
}

}  // namespace

// How an operation is issued: its type, its title in profiles, its timeout, and whether it is asynchronous.
struct Backend::Issue {
  OpType type;
  const char* title;
  Milliseconds timeout = kUnsetTimeout;
  bool async = true;
};

c10::intrusive_ptr<Backend> Backend::make(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                          const std::vector<int64_t>& ranks, Milliseconds timeout,
                                          const Backend* parent) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "the timeout must be positive, not ", timeout.count(), " ms");
  const auto timeout_ms = static_cast<std::uint64_t>(timeout.count());
  auto membership = checked([&] {
    if (ranks.empty()) {
      return join_all(static_cast<std::size_t>(rank), static_cast<std::size_t>(size), timeout_ms,
                      std::make_unique<C10dStore>(store));
    }
    const std::vector<std::size_t> members(ranks.begin(), ranks.end());
    const rust::Slice<const std::size_t> named{members.data(), members.size()};
    return parent ? parent->membership_->split(named, timeout_ms) : join_some(named, timeout_ms);
  });
  return c10::make_intrusive<Backend>(std::move(membership), rank, size, timeout);
}

Backend::Backend(rust::Box<Membership> membership, int rank, int size, Milliseconds timeout)
    : c10d::Backend(rank, size),
      membership_(std::move(membership)),
      group_(static_cast<int64_t>(membership_->group())),
      timeout_ms_(timeout.count()) {}

Backend::~Backend() = default;

c10::intrusive_ptr<Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(getBackendName(), Milliseconds(timeout_ms_));
  options->group_name = getGroupUid();
  compat::set_group_desc(*options, getGroupDesc(), compat::Preferred());
  for (const auto rank : membership_->ranks()) options->global_ranks_in_group.push_back(rank);
  return options;
}

void Backend::setTimeout(Milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "the timeout must be positive, not ", timeout.count(), " ms");
  timeout_ms_ = timeout.count();
}

Backend::Works Backend::issue(const Issue& what, std::vector<TensorOperation> operations, const Tensors& inputs,
                              const Tensors& outputs) {
  const bool has_timeout = what.timeout != kUnsetTimeout && what.timeout != kNoTimeout;
  const auto timeout_ms = has_timeout ? what.timeout.count() : timeout_ms_.load();
  for (auto& operation : operations) operation.core.timeout_ms = static_cast<std::uint64_t>(timeout_ms);
  if (!c10d::isP2POp(what.type)) ++sequence_;
  const bool on_device = !operations.empty() && operations[0].device();
  if (batch_) {
    if (!batch_->work && !batch_->device_work) {
      if (on_device) {
        batch_->device_work = c10::make_intrusive<DeviceWork>(getRank(), OpType::COALESCED, "smddp:coalesced", group_,
                                                              Tensors(), outputs);
      } else {
        batch_->work =
            c10::make_intrusive<GroupWork>(getRank(), OpType::COALESCED, "smddp:coalesced", Tensors(), Tensors());
      }
    }
    TORCH_CHECK_VALUE(on_device == static_cast<bool>(batch_->device_work),
                      "operations on CPU and CUDA tensors cannot be coalesced");
    std::move(operations.begin(), operations.end(), std::back_inserter(batch_->operations));
    // Torch would wait for the work of a synchronous operation, which starts only when the block ends.
    if (!what.async) return nullptr;
    if (on_device) return batch_->device_work;
    return batch_->work;
  }
  if (on_device) {
    auto work = c10::make_intrusive<DeviceWork>(getRank(), what.type, what.title, group_, inputs, outputs);
    if (what.async) {
      work->start(std::move(operations));
    } else {
      work->run(operations);
    }
    return work;
  }
  auto work = c10::make_intrusive<GroupWork>(getRank(), what.type, what.title, inputs, outputs);
  if (what.async) {
    work->start(std::move(operations));
  } else {
    work->run(operations);
  }
  return work;
}

Backend::Works Backend::issue(const Issue& what, TensorOperation operation, const Tensors& inputs,
                              const Tensors& outputs) {
  std::vector<TensorOperation> operations;
  operations.push_back(std::move(operation));
  return issue(what, std::move(operations), inputs, outputs);
}

// Runs `body`, which describes and issues a collective. A collective that this rank cannot describe, such as one with
// an unknown element type, still takes its place in the group's order: the other ranks get an error instead of waiting.
template <class Body>
Backend::Works Backend::in_turn(const Tensors& tensors, Body&& body) {
  const bool on_device = !tensors.empty() && tensors[0].is_cuda();
  try {
    return body();
  } catch (const c10::Error& error) {
    give_up(error.what_without_backtrace(), on_device);
    throw;
  } catch (const std::exception& error) {
    give_up(error.what(), on_device);
    throw;
  }
}

void Backend::give_up(const std::string& message, bool on_device) noexcept {
  // An error with a code comes from the core, which has told the other ranks.
  if (!report_code(message).empty()) return;
  // Torch does not call `endCoalescing` after an exception. All operations of the block fail with this one.
  batch_.reset();
  // On devices, ranks that wait compare their calls, so the others need not be told.
  if (on_device) return;
  try {
    fail_next(static_cast<std::uint64_t>(group_), message);
  } catch (const rust::Error&) {
    // The group is closed: no rank waits.
  }
}

Backend::Works Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return in_turn(tensors, [&] {
    return issue({OpType::BROADCAST, "smddp:broadcast", options.timeout, options.asyncOp},
                 torch_ext::broadcast_(only(tensors, "broadcast"), options.rootRank, group_), tensors, tensors);
  });
}

Backend::Works Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!tensors.empty() && tensors[0].layout() == at::kSparse) return allreduce_sparse(tensors, options);
  return in_turn(tensors, [&] {
    const auto& tensor = only(tensors, "all_reduce");
    return issue({OpType::ALLREDUCE, "smddp:all_reduce", options.timeout, options.asyncOp},
                 torch_ext::all_reduce_(contribute(tensor, options.reduceOp), name_of(options.reduceOp), group_),
                 tensors, tensors);
  });
}

Backend::Works Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return in_turn(tensors, [&] {
    std::vector<TensorOperation> operations;
    for (const auto& tensor : tensors) {
      operations.push_back(
          torch_ext::all_reduce_(contribute(tensor, options.reduceOp), name_of(options.reduceOp), group_));
    }
    return issue({OpType::ALLREDUCE_COALESCED, "smddp:all_reduce", options.timeout, options.asyncOp},
                 std::move(operations), tensors, tensors);
  });
}

Backend::Works Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return in_turn(tensors, [&] {
    const auto& tensor = only(tensors, "reduce");
    const bool is_root = options.rootRank == getRank();
    const auto& mine = is_root ? contribute(tensor, options.reduceOp) : contribution(tensor, options.reduceOp);
    return issue({OpType::REDUCE, "smddp:reduce", options.timeout, options.asyncOp},
                 torch_ext::reduce_(mine, name_of(options.reduceOp), options.rootRank, group_), tensors, tensors);
  });
}

Backend::Works Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) {
  return in_turn(inputs, [&] {
    const auto& blocks = only(outputs, "all_gather");
    return issue({OpType::ALLGATHER, "smddp:all_gather", options.timeout, options.asyncOp},
                 torch_ext::all_gather(blocks, only(inputs, "all_gather"), group_), inputs, blocks);
  });
}

Backend::Works Backend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return in_turn({input}, [&] {
    return issue({OpType::_ALLGATHER_BASE, "smddp:_all_gather_base", options.timeout, options.asyncOp},
                 torch_ext::all_gather_single(output, input, group_), {input}, {output});
  });
}

Backend::Works Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) {
  return in_turn(inputs, [&] {
    TORCH_CHECK_VALUE(outputs.size() == static_cast<std::size_t>(getSize()),
                      "all_gather_coalesced takes one list of outputs for each of the ", getSize(), " ranks, not ",
                      outputs.size());
    Tensors all;
    for (const auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), "all_gather_coalesced has ", inputs.size(),
                        " inputs and lists of ", list.size(), " outputs");
      all.insert(all.end(), list.begin(), list.end());
    }
    std::vector<TensorOperation> operations;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors blocks;
      for (const auto& list : outputs) blocks.push_back(list[i]);
      operations.push_back(torch_ext::all_gather(blocks, inputs[i], group_));
    }
    return issue({OpType::ALLGATHER_COALESCED, "smddp:all_gather", options.timeout, options.asyncOp},
                 std::move(operations), inputs, all);
  });
}

Backend::Works Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  return in_turn(inputs, [&] {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "all_gather_into_tensor_coalesced has ", inputs.size(),
                      " inputs and ", outputs.size(), " outputs");
    std::vector<TensorOperation> operations;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      operations.push_back(torch_ext::all_gather_single(outputs[i], inputs[i], group_));
    }
    return issue({OpType::ALLGATHER_COALESCED, "smddp:_all_gather_base", options.timeout, options.asyncOp},
                 std::move(operations), inputs, outputs);
  });
}

Backend::Works Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return in_turn(inputs, [&] {
    const bool is_root = options.rootRank == getRank();
    TORCH_CHECK_VALUE(is_root || outputs.empty(), "gather: only the root takes outputs");
    const auto& blocks = is_root ? only(outputs, "gather") : Tensors();
    return issue({OpType::GATHER, "smddp:gather", options.timeout, options.asyncOp},
                 torch_ext::gather(blocks, only(inputs, "gather"), options.rootRank, group_), inputs, blocks);
  });
}

Backend::Works Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  return in_turn(outputs, [&] {
    const bool is_root = options.rootRank == getRank();
    TORCH_CHECK_VALUE(is_root || inputs.empty(), "scatter: only the root takes inputs");
    const auto& blocks = is_root ? only(inputs, "scatter") : Tensors();
    return issue({OpType::SCATTER, "smddp:scatter", options.timeout, options.asyncOp},
                 torch_ext::scatter(only(outputs, "scatter"), blocks, options.rootRank, group_), blocks, outputs);
  });
}

Backend::Works Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ReduceScatterOptions& options) {
  return in_turn(outputs, [&] {
    Tensors blocks;
    for (const auto& block : only(inputs, "reduce_scatter")) blocks.push_back(contribution(block, options.reduceOp));
    return issue({OpType::REDUCE_SCATTER, "smddp:reduce_scatter", options.timeout, options.asyncOp},
                 torch_ext::reduce_scatter(only(outputs, "reduce_scatter"), blocks, name_of(options.reduceOp), group_),
                 blocks, outputs);
  });
}

Backend::Works Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                             const c10d::ReduceScatterOptions& options) {
  return in_turn({input}, [&] {
    return issue({OpType::_REDUCE_SCATTER_BASE, "smddp:_reduce_scatter_base", options.timeout, options.asyncOp},
                 torch_ext::reduce_scatter_single(output, contribution(input, options.reduceOp),
                                                  name_of(options.reduceOp), group_),
                 {input}, {output});
  });
}

Backend::Works Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                        const c10d::ReduceScatterOptions& options) {
  return in_turn(inputs, [&] {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced has ", inputs.size(),
                      " inputs and ", outputs.size(), " outputs");
    const auto op = name_of(options.reduceOp);
    std::vector<TensorOperation> operations;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      operations.push_back(
          torch_ext::reduce_scatter_single(outputs[i], contribution(inputs[i], options.reduceOp), op, group_));
    }
    return issue({OpType::COALESCED, "smddp:_reduce_scatter_base", options.timeout, options.asyncOp},
                 std::move(operations), inputs, outputs);
  });
}

Backend::Works Backend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  return in_turn({input}, [&] {
    return issue({OpType::ALLTOALL_BASE, "smddp:all_to_all", options.timeout, options.asyncOp},
                 torch_ext::all_to_all_single(output, input, output_sizes, input_sizes, group_), {input}, {output});
  });
}

Backend::Works Backend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return in_turn(inputs, [&] {
    return issue({OpType::ALLTOALL, "smddp:all_to_all", options.timeout, options.asyncOp},
                 torch_ext::all_to_all(outputs, inputs, group_), inputs, outputs);
  });
}

Backend::Works Backend::send(Tensors& tensors, int to, int tag) {
  return issue({OpType::SEND, "smddp:send"}, torch_ext::send(only(tensors, "send"), to, tag, group_), tensors, {});
}

Backend::Works Backend::recv(Tensors& tensors, int from, int tag) {
  return issue({OpType::RECV, "smddp:recv"}, torch_ext::recv_(only(tensors, "recv"), from, tag, group_), tensors,
               tensors);
}

Backend::Works Backend::recvAnysource(Tensors& tensors, int tag) {
  auto operation = torch_ext::recv_(only(tensors, "recv"), 0, tag, group_);
  operation.core.collective = Collective::RecvAny;
  return issue({OpType::RECVANYSOURCE, "smddp:recvAnySource"}, std::move(operation), tensors, tensors);
}

Backend::Works Backend::barrier(const c10d::BarrierOptions& options) {
  return issue({OpType::BARRIER, "smddp:barrier", options.timeout, options.asyncOp}, torch_ext::barrier(group_), {},
               {});
}

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const auto timeout_ms = options.timeout == kUnsetTimeout ? timeout_ms_.load() : options.timeout.count();
  try {
    monitored_barrier(static_cast<std::uint64_t>(group_), static_cast<std::uint64_t>(timeout_ms), wait_all_ranks);
  } catch (const rust::Error& error) {
    // As in `GroupWork::wait`.
    if (report_code(error.what()) != "interrupted" || !raise_on_return()) throw_report(error.what());
  }
}

// Gathers the entries of all ranks; coalescing then sums entries with equal indices. The operation consists of several
// dependent collectives and is complete when this returns.
Backend::Works Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return in_turn(tensors, [&] {
    const auto& tensor = only(tensors, "all_reduce");
    TORCH_CHECK_VALUE(options.reduceOp == c10d::ReduceOp::SUM, "sparse tensors can be summed only");
    TORCH_CHECK_VALUE(!batch_, "all_reduce of sparse tensors cannot be part of coalesced operations");
    const c10::NoGradGuard no_grad;
    const auto entries = tensor.coalesce();
    const auto run_now = [&](TensorOperation operation) {
      issue({OpType::_ALLREDUCE_SPARSE, "smddp:sparse_all_reduce", options.timeout, false}, std::move(operation),
            {tensor}, {})
          ->wait();
    };
    const auto count = at::full({1}, entries._nnz(), at::kLong);
    const auto counts = at::empty({getSize()}, at::kLong);
    run_now(torch_ext::all_gather_single(counts, count, group_));
    const auto gathered = [&](const at::Tensor& mine, int64_t dimension) {
      Tensors blocks;
      for (int rank = 0; rank < getSize(); ++rank) {
        auto sizes = mine.sizes().vec();
        sizes[static_cast<std::size_t>(dimension)] = counts[rank].item<int64_t>();
        blocks.push_back(at::empty(sizes, mine.options()));
      }
      run_now(torch_ext::all_gather(blocks, mine, group_));
      return at::cat(blocks, dimension);
    };
    const auto indices = gathered(entries.indices(), 1);
    const auto values = gathered(entries.values(), 0);
    tensor.copy_(at::sparse_coo_tensor(indices, values, tensor.sizes(), tensor.options()).coalesce());
    return issue({OpType::_ALLREDUCE_SPARSE, "smddp:sparse_all_reduce", options.timeout, false},
                 std::vector<TensorOperation>(), {}, tensors);
  });
}

void Backend::startCoalescing() {
  // An exception inside of torch's `_coalescing_manager` leaves its operations behind. No rank may wait for them.
  if (batch_ && !batch_->operations.empty()) {
    give_up("the operations that were being coalesced were not ended", static_cast<bool>(batch_->device_work));
  }
  batch_.emplace();
}

Backend::Works Backend::endCoalescing() {
  TORCH_CHECK(batch_, "no operations are being coalesced, or one of them was refused");
  auto batch = std::move(*batch_);
  batch_.reset();
  if (batch.device_work) {
    batch.device_work->start(std::move(batch.operations));
    return batch.device_work;
  }
  if (!batch.work) {
    batch.work = c10::make_intrusive<GroupWork>(getRank(), OpType::COALESCED, "smddp:coalesced", Tensors(), Tensors());
  }
  batch.work->start(std::move(batch.operations));
  return batch.work;
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  const auto mine = membership_->ranks();
  std::vector<int64_t> members;
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < getSize(), "split: there is no rank ", rank, " in a group of ", getSize());
    members.push_back(static_cast<int64_t>(mine[static_cast<std::size_t>(rank)]));
  }
  const auto position = std::find(ranks.begin(), ranks.end(), getRank());
  if (position == ranks.end()) {
    split_nocolor();
    return nullptr;
  }
  return make(store, static_cast<int>(position - ranks.begin()), static_cast<int>(ranks.size()), members,
              options ? options->timeout : Milliseconds(timeout_ms_), this);
}

void Backend::split_nocolor() const {
  checked([&] { membership_->split_nocolor(static_cast<std::uint64_t>(timeout_ms_.load())); });
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cuda() || !device.has_index()) return;
  checked([&] { membership_->connect_device(static_cast<std::uint16_t>(device.index())); });
}

void Backend::abort() { membership_->close(); }

void Backend::shutdown() { membership_->close(); }

namespace {

// The `smddp` backend of a process group, or null.
const Backend* ours(c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes()) {
    if (const auto* backend = dynamic_cast<const Backend*>(group.getBackend(device.type()).get())) return backend;
  }
  return nullptr;
}

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Python cannot get an object of a C++ class that it does not know. So the function takes a process group and sets the
// backend in it. The group's store serves as the rendezvous.
void add_backend(const Group& group, const std::vector<int64_t>& ranks, int64_t timeout_ms,
                 const std::optional<Group>& parent) {
  group->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    Backend::make(group->getStore(), group->getRank(), group->getSize(), ranks,
                                  Milliseconds(timeout_ms), parent ? ours(**parent) : nullptr));
}

void split_nocolor(const Group& parent) {
  if (const auto* backend = ours(*parent)) backend->split_nocolor();
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(smd, m) {
  m.def(
      "add_backend(__torch__.torch.classes.c10d.ProcessGroup group, int[] ranks, int timeout_ms, "
      "__torch__.torch.classes.c10d.ProcessGroup? parent) -> ()",
      boxed<&add_backend>());
  m.def("split_nocolor(__torch__.torch.classes.c10d.ProcessGroup parent) -> ()", boxed<&split_nocolor>());
}

}  // namespace smd::torch_ext
