#include "operations.h"

#include <limits>
#include <utility>

namespace smd::torch_ext {

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
  operation.write_blocks(outputs);
  operation.read_own_block(input);
  return operation;
}

TensorOperation all_gather_single(const at::Tensor& output, const at::Tensor& input, int64_t group) {
  TensorOperation operation(Collective::AllGather, group);
  operation.write_rows(output, {});
  operation.read_own_block(input);
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
  operation.read_blocks(inputs);
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

namespace {

std::uint32_t checked_tag(int64_t tag) {
  TORCH_CHECK_VALUE(tag >= 0 && tag <= std::numeric_limits<std::uint32_t>::max(), "tag ", tag,
                    " is out of range: expected 0 to ", std::numeric_limits<std::uint32_t>::max());
  return static_cast<std::uint32_t>(tag);
}

}  // namespace

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

}  // namespace smd::torch_ext
