// PyTorch's tensors as the core's views. The only place that looks inside a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>
#include <vector>

#include "smd/operation.h"

namespace smd::torch_ext {

// An operation on tensors: the core's description, and what must live until the operation is complete.
//
// The core works on dense memory. A tensor that is dense is used where it lies; another one (strided, conjugated)
// gets a dense stand-in, and `finish` copies the stand-in of an output back.
class TensorOperation {
 public:
  TensorOperation(Collective collective, int64_t group);

  // Describe the arguments, outputs first: an input that shares memory with an output is copied.
  void write(const at::Tensor& tensor);
  void read(const at::Tensor& tensor);
  // As `write` and `read`, one tensor a rank. On a device, blocks of equal size are made to lie side by side.
  void write_blocks(at::TensorList tensors);
  void read_blocks(at::TensorList tensors);
  // In place: the same memory is input and output.
  void update(const at::Tensor& tensor);
  // An output of no elements, for ranks that receive nothing.
  void write_nothing(const at::Tensor& like);

  // As `write` and `read`, one block a rank: `rows[i]` rows of dimension 0 for rank i, or equal parts if `rows` is
  // empty.
  void write_rows(const at::Tensor& tensor, at::IntArrayRef rows);
  void read_rows(const at::Tensor& tensor, at::IntArrayRef rows);

  // Called once, after the core is done and before anybody looks at the outputs. Of an operation on a device: after it
  // was queued, with its stream being the current one.
  void finish() const;

  // The CUDA device that it works on; nothing if it works on the CPU, or on no tensor at all.
  std::optional<c10::Device> device() const;
  // The stream into which an operation on a device is queued; the one that was current when the tensors were described,
  // unless it is changed here.
  void set_stream(std::size_t handle);
  // Memory that the operation reads or writes.
  const std::vector<c10::Storage>& storages() const { return kept_; }

  Operation core;

 private:
  at::Tensor dense_output(const at::Tensor& tensor);
  at::Tensor dense_input(const at::Tensor& tensor);
  std::vector<TensorView> split(const at::Tensor& dense, at::IntArrayRef rows, const char* what) const;

  // Storages, not tensors: to let go of a tensor on a thread of the core could take Python's lock.
  std::vector<c10::Storage> kept_;
  // First byte and end of every output.
  std::vector<std::pair<const char*, const char*>> written_;
  // An output and its stand-in.
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

// Throws PyTorch's type error for a tensor that the core has no description for.
TensorView describe(const at::Tensor& dense);

}  // namespace smd::torch_ext
