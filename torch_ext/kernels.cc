// Bodies of the ops: describe the tensors, call the core, complete.

#include <torch/library.h>

#include <limits>
#include <string>

#include "adapter.h"
#include "completion.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

TensorOperation all_reduce_(const at::Tensor& tensor, std::string op, int64_t group) {
  TensorOperation operation(Collective::AllReduce, group);
  operation.core.op = std::move(op);
  operation.update(tensor);
  return operation;
}

TensorOperation reduce_(const at::Tensor& tensor, std::string op, int64_t root, int64_t group) {
  TensorOperation operation(Collective::Reduce, group);
  operation.core.op = std::move(op);
  operation.core.peer = root;
  if (static_cast<int64_t>(group_rank(operation.core.group)) == root) {
    operation.update(tensor);
  } else {
    operation.read(tensor);
    operation.write_nothing(tensor);
  }
  return operation;
}

TensorOperation broadcast_(const at::Tensor& tensor, int64_t root, int64_t group) {
  TensorOperation operation(Collective::Broadcast, group);
  operation.core.peer = root;
  operation.update(tensor);
  return operation;
}

TensorOperation all_gather(at::TensorList outputs, const at::Tensor& input, int64_t group) {
  TensorOperation operation(Collective::AllGather, group);
  for (const auto& output : outputs) operation.write(output);
  operation.read(input);
  return operation;
}

TensorOperation all_gather_single(const at::Tensor& output, const at::Tensor& input, int64_t group) {
  TensorOperation operation(Collective::AllGather, group);
  operation.write_rows(output, {});
  operation.read(input);
  return operation;
}

TensorOperation gather(at::TensorList outputs, const at::Tensor& input, int64_t root, int64_t group) {
  TensorOperation operation(Collective::Gather, group);
  operation.core.peer = root;
  for (const auto& output : outputs) operation.write(output);
  operation.read(input);
  return operation;
}

TensorOperation scatter(const at::Tensor& output, at::TensorList inputs, int64_t root, int64_t group) {
  TensorOperation operation(Collective::Scatter, group);
  operation.core.peer = root;
  operation.write(output);
  for (const auto& input : inputs) operation.read(input);
  return operation;
}

TensorOperation reduce_scatter(const at::Tensor& output, at::TensorList inputs, std::string op, int64_t group) {
  TensorOperation operation(Collective::ReduceScatter, group);
  operation.core.op = std::move(op);
  operation.write(output);
  for (const auto& input : inputs) operation.read(input);
  return operation;
}

TensorOperation reduce_scatter_single(const at::Tensor& output, const at::Tensor& input, std::string op,
                                      int64_t group) {
  TensorOperation operation(Collective::ReduceScatter, group);
  operation.core.op = std::move(op);
  operation.write(output);
  operation.read_rows(input, {});
  return operation;
}

TensorOperation all_to_all(at::TensorList outputs, at::TensorList inputs, int64_t group) {
  TensorOperation operation(Collective::AllToAll, group);
  for (const auto& output : outputs) operation.write(output);
  for (const auto& input : inputs) operation.read(input);
  return operation;
}

TensorOperation all_to_all_single(const at::Tensor& output, const at::Tensor& input, at::IntArrayRef output_sizes,
                                  at::IntArrayRef input_sizes, int64_t group) {
  TensorOperation operation(Collective::AllToAll, group);
  operation.write_rows(output, output_sizes);
  operation.read_rows(input, input_sizes);
  return operation;
}

TensorOperation barrier(int64_t group) { return {Collective::Barrier, group}; }

std::uint32_t checked_tag(int64_t tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag <= std::numeric_limits<std::uint32_t>::max(), "tag ", tag,
                    " is out of range: expected 0 to ", std::numeric_limits<std::uint32_t>::max());
  return static_cast<std::uint32_t>(tag);
}

TensorOperation send(const at::Tensor& tensor, int64_t to, int64_t tag, int64_t group) {
  TensorOperation operation(Collective::Send, group);
  operation.core.peer = to;
  operation.core.tag = checked_tag(tag);
  operation.read(tensor);
  return operation;
}

TensorOperation recv_(const at::Tensor& tensor, int64_t source, int64_t tag, int64_t group) {
  TensorOperation operation(Collective::Recv, group);
  operation.core.peer = source;
  operation.core.tag = checked_tag(tag);
  operation.write(tensor);
  return operation;
}

// The blocking, the asynchronous and the shape-only form of an operation, from its description.
template <auto describe>
struct Forms;

template <class... Arguments, TensorOperation (*describe)(Arguments...)>
struct Forms<describe> {
  static void blocking(Arguments... arguments) {
    checked([&] { run(describe(std::forward<Arguments>(arguments)...)); });
  }
  static c10::intrusive_ptr<Work> async(Arguments... arguments) {
    return checked([&] { return start(describe(std::forward<Arguments>(arguments)...)); });
  }
  // Every operation works on tensors that exist, so shapes stay as they are.
  static void shapes(Arguments...) {}
};

template <class Register>
void each(Register&& add) {
  add("all_reduce_", Forms<&all_reduce_>{});
  add("reduce_", Forms<&reduce_>{});
  add("broadcast_", Forms<&broadcast_>{});
  add("all_gather", Forms<&all_gather>{});
  add("all_gather_single", Forms<&all_gather_single>{});
  add("gather", Forms<&gather>{});
  add("scatter", Forms<&scatter>{});
  add("reduce_scatter", Forms<&reduce_scatter>{});
  add("reduce_scatter_single", Forms<&reduce_scatter_single>{});
  add("all_to_all", Forms<&all_to_all>{});
  add("all_to_all_single", Forms<&all_to_all_single>{});
  add("send", Forms<&send>{});
  add("recv_", Forms<&recv_>{});
}

}  // namespace

TORCH_LIBRARY_IMPL(smd, Meta, m) {
  each([&m](const std::string& name, auto forms) { m.impl(name.c_str(), TORCH_FN(decltype(forms)::shapes)); });
}

// For every backend: the adapter and the core say what a tensor that is not dense CPU memory needs, in clearer words
// than the dispatcher's.
TORCH_LIBRARY_IMPL(smd, CompositeExplicitAutograd, m) {
  each([&m](const std::string& name, auto forms) {
    using F = decltype(forms);
    m.impl(name.c_str(), TORCH_FN(F::blocking));
    m.impl((name + "_async").c_str(), TORCH_FN(F::async));
  });
  m.impl("rank", [] { return checked([] { return static_cast<int64_t>(rank()); }); });
  m.impl("size", [] { return checked([] { return static_cast<int64_t>(size()); }); });
  m.impl("session_id", [] { return checked([] { return static_cast<int64_t>(session_id()); }); });
  m.impl("barrier", TORCH_FN(Forms<&barrier>::blocking));
  m.impl("barrier_async", TORCH_FN(Forms<&barrier>::async));
}

}  // namespace smd::torch_ext
