// Converts TensorFlow's tensors to the core's views.
#pragma once

#include <cstdint>
#include <vector>

#include "smd/operation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace smd::tf_ops {

// The device on which a kernel's tensors lie: the CPU, or a GPU with the compute stream that produces and consumes
// them. A library built for TensorFlow's CPU package registers GPU kernels too, because it needs no more of CUDA than
// the stream's handle.
struct Place {
  DeviceKind device = DeviceKind::Cpu;
  std::uint16_t index = 0;
  std::size_t stream = 0;
};

Place place_of(tensorflow::OpKernelContext* context);

// Describes a tensor, which TensorFlow keeps dense. The core writes to outputs only.
TensorView describe(const tensorflow::Tensor& tensor, const Place& place);

// An operation on tensors: the core's description, and the tensors that must stay alive until the operation completes.
class TensorOperation {
 public:
  TensorOperation(Collective collective, std::int64_t group, const Place& place);

  void write(const tensorflow::Tensor& tensor);
  void read(const tensorflow::Tensor& tensor);
  // Adds an output without elements, for ranks that receive nothing.
  void write_nothing(const tensorflow::Tensor& like);

  // As `write` and `read`, with one block for each rank: `rows[i]` rows of dimension 0 for rank i. The sum of `rows` is
  // the size of dimension 0.
  void write_rows(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows);
  void read_rows(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows);

  // Drops the references to the tensors, so that the next owner may find them unshared and reuse their memory.
  void release() { kept_.clear(); }

  const Place& place() const { return place_; }

  Operation core;

 private:
  Place place_;
  std::vector<tensorflow::Tensor> kept_;
};

// The number of elements in one row of dimension 0; also right for a shape with no rows.
std::size_t row_elems(const tensorflow::TensorShape& shape);

}  // namespace smd::tf_ops
