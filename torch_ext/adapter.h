// Converts PyTorch's tensors to the core's views.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>
#include <vector>

#include "smd/operation.h"

namespace smd::torch_ext {

// An operation on tensors: the core's description, and the memory that must stay alive until the operation completes.
//
// The core works on dense memory. A dense tensor is used where it lies. Any other tensor (strided, conjugated) gets a
// dense copy, and `finish` copies the results back.
class TensorOperation {
 public:
  TensorOperation(Collective collective, int64_t group);

  // Describe the arguments, outputs first: an input that shares memory with an output is copied.
  void write(const at::Tensor& tensor);
  void read(const at::Tensor& tensor);
  // As `read`, but the input may be this rank's own output, which then has its value already.
  void read_own_block(const at::Tensor& tensor);
  // As `write` and `read`, with one tensor for each rank. On a device, blocks of equal size are made adjacent.
  void write_blocks(at::TensorList tensors);
  void read_blocks(at::TensorList tensors);
  // Adds a tensor that is input and output.
  void update(const at::Tensor& tensor);
  // Adds an output without elements, for ranks that receive nothing.
  void write_nothing(const at::Tensor& like);

  // As `write` and `read`, with one block for each rank: `rows[i]` rows of dimension 0 for rank i, or equal blocks if
  // `rows` is empty.
  void write_rows(const at::Tensor& tensor, at::IntArrayRef rows);
  void read_rows(const at::Tensor& tensor, at::IntArrayRef rows);

  // Copies results back. Call it once, after the core has completed the operation and before the outputs are read. For
  // an operation on a device: after it is queued, with its stream as the current one.
  void finish() const;

  // The CUDA device of the operation's tensors; none if they are on the CPU or there are none.
  std::optional<c10::Device> device() const;
  // Sets the stream into which an operation on a device is queued. The default is the stream that was current when the
  // tensors were described.
  void set_stream(std::size_t handle);
  // The memory that the operation reads or writes.
  c10::ArrayRef<c10::Storage> storages() const { return kept_; }

  Operation core;

 private:
  at::Tensor dense_output(const at::Tensor& tensor);
  at::Tensor dense_input(const at::Tensor& tensor);
  bool overlaps_output(const at::Tensor& dense) const;
  std::vector<TensorView> split(const at::Tensor& dense, at::IntArrayRef rows, const char* what) const;

  // Storages and not tensors: a tensor that a thread of the core releases could take Python's lock.
  c10::SmallVector<c10::Storage, 2> kept_;
  // The first byte and the end of every output.
  c10::SmallVector<std::pair<const char*, const char*>, 1> written_;
  // Each output that is not dense, with its dense copy.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// Throws PyTorch's type error for an element type or device that the core does not support.
TensorView describe(const at::Tensor& dense);

}  // namespace smd::torch_ext
