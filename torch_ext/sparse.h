// Reduces sparse gradients, which have no place in a bucket: nobody knows before how many rows there are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace smd::torch_ext {

// The averages over the ranks of `group` of the gradients at the same place in every rank's list. A gradient is
// undefined if a rank has none, which counts as zero, and stays so if none has. Where all are sparse, indices and
// values are gathered and the average is sparse; where one is dense, the average is.
//
// `like` says what a gradient looks like where there is none. Collective.
std::vector<at::Tensor> average_sparse(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& like,
                                       int64_t group);

}  // namespace smd::torch_ext
