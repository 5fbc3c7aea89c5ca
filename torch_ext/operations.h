// Describes the operations on tensors for the core. torch.ops.smd and the c10d backend share these functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "adapter.h"

namespace smd::torch_ext {

// ops.cc documents each operation.
TensorOperation all_reduce_(const at::Tensor& tensor, std::string op, int64_t group);
TensorOperation reduce_(const at::Tensor& tensor, std::string op, int64_t root, int64_t group);
TensorOperation broadcast_(const at::Tensor& tensor, int64_t root, int64_t group);
TensorOperation all_gather(at::TensorList outputs, const at::Tensor& input, int64_t group);
TensorOperation all_gather_single(const at::Tensor& output, const at::Tensor& input, int64_t group);
TensorOperation gather(at::TensorList outputs, const at::Tensor& input, int64_t root, int64_t group);
TensorOperation scatter(const at::Tensor& output, at::TensorList inputs, int64_t root, int64_t group);
TensorOperation reduce_scatter(const at::Tensor& output, at::TensorList inputs, std::string op, int64_t group);
TensorOperation reduce_scatter_single(const at::Tensor& output, const at::Tensor& input, std::string op, int64_t group);
TensorOperation all_to_all(at::TensorList outputs, at::TensorList inputs, int64_t group);
TensorOperation all_to_all_single(const at::Tensor& output, const at::Tensor& input, at::IntArrayRef output_sizes,
                                  at::IntArrayRef input_sizes, int64_t group);
TensorOperation barrier(int64_t group);
TensorOperation send(const at::Tensor& tensor, int64_t to, int64_t tag, int64_t group);
TensorOperation recv_(const at::Tensor& tensor, int64_t source, int64_t tag, int64_t group);

}  // namespace smd::torch_ext
