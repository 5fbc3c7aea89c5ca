// TensorFlow's tensors as the core's views. The only place that looks inside a tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "smd/operation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace smd::tf_ops {

// Where the tensors of a kernel lie: on the CPU, or on the GPU whose compute stream makes and uses them. A library for
// TensorFlow's CPU builds registers kernels for GPUs as well: it takes no more of CUDA than the stream's handle.
struct Place {
  DeviceKind device = DeviceKind::Cpu;
  std::uint16_t index = 0;
  std::size_t stream = 0;
};

Place place_of(tensorflow::OpKernelContext* context);

// Tensors of TensorFlow are dense. The core writes to outputs only.
TensorView describe(const tensorflow::Tensor& tensor, const Place& place);

// An operation on tensors: the core's description, and what must live until the operation is complete.
class TensorOperation {
 public:
  TensorOperation(Collective collective, std::int64_t group, const Place& place);

  void write(const tensorflow::Tensor& tensor);
  void read(const tensorflow::Tensor& tensor);
  // An output of no elements, for ranks that receive nothing.
  void write_nothing(const tensorflow::Tensor& like);

  // As `write` and `read`, one block a rank: `rows[i]` rows of dimension 0 for rank i. They add up to the tensor.
  void write_rows(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows);
  void read_rows(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows);

  // Lets go of the tensors, so that who gets them next may find them unshared.
  void release() { kept_.clear(); }

  const Place& place() const { return place_; }

  Operation core;

 private:
  Place place_;
  std::vector<tensorflow::Tensor> kept_;
};

// Elements of one row of dimension 0, also of a tensor that has none.
std::size_t row_elems(const tensorflow::TensorShape& shape);

}  // namespace smd::tf_ops
