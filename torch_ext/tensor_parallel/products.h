// Products of tensor-parallel layers, which run beside the exchange of their inputs and results.
//
// - TPP-1: products of a rank and operations of its group overlap: the operations run in the group's own stream.
// - TPP-2: a product whose result is summed over the group is divided into chunks of rows. A chunk is summed while the
//   next one is computed. The number of chunks is measured (chunks.h); on the CPU it is 1.
// - TPP-3: a product whose input is gathered begins with the rank's own rows, while those of the others arrive.
// - TPP-4: these operations have no derivative. `nn/products.py` calls them in the forward and backward of autograd
//   functions, also where a compiler traces them.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace smd::torch_ext {

// The sum over the group of `input @ weight.t()`. `input` is [.., features], `weight` [results, features].
//
// Returns: [.., results]; with `shares_rows`, this rank's share of the rows: [ceil(rows / ranks), results]. Rows that
// are missing in the last share are zero.
at::Tensor summed_product(const at::Tensor& input, const at::Tensor& weight, bool shares_rows, int64_t group);

// The products of the rows of all ranks with several weights. `own` is [share, features], and `rows` the number of all
// rows, at most `share` times the number of ranks.
//
// Returns: all rows [rows, features], then for each weight [rows, results].
std::vector<at::Tensor> gathered_products(const at::Tensor& own, at::TensorList weights,
                                          const c10::List<std::optional<at::Tensor>>& biases, int64_t rows,
                                          int64_t group);

// The gradients of products of one input [.., features] with several weights, of which each rank has slices. The
// gradient of the input is summed over the group while those of the weights are computed.
//
// Args:
//   gradients: Of each product, [.., results].
//   needs: Whether the gradient of the input, and that of each weight, is needed.
//   share: The number of rows of the input's gradient that a rank gets; -1 if all ranks get all rows.
//
// Returns: the gradient of the input, then that of each weight. One that is not needed has no elements. Those of small
// weights may be parts of one tensor.
std::vector<at::Tensor> products_backward(at::TensorList gradients, const at::Tensor& input, at::TensorList weights,
                                          const c10::List<bool>& needs, int64_t share, int64_t group);

}  // namespace smd::torch_ext
