// TensorFlow's tensors as the core's views. The only place that looks inside a tensor.
#pragma once

#include <utility>
#include <vector>

#include "smd/operation.h"
#include "tensorflow/core/framework/tensor.h"

namespace smd::tf_ops {

// An operation on tensors: the core's description, and what must live until the operation is complete. Tensors of
// TensorFlow are dense and lie on the CPU here: only CPU kernels are registered, and TensorFlow moves what is
// elsewhere.
class TensorOperation {
 public:
  TensorOperation(Collective collective, std::int64_t group);

  void write(const tensorflow::Tensor& tensor);
  void read(const tensorflow::Tensor& tensor);

  // As `write`, one block a rank: equal parts of dimension 0.
  void write_rows(const tensorflow::Tensor& tensor, std::size_t parts);

  Operation core;

 private:
  std::vector<tensorflow::Tensor> kept_;
};

}  // namespace smd::tf_ops
