// Reduces sparse gradients. They have no slot in a bucket, because their numbers of rows are not known in advance.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace smd::torch_ext {

// Averages the gradients at the same place of every rank's list over the ranks of `group`. An undefined gradient counts
// as zero; the result is undefined if it is so on all ranks. If all are sparse, indices and values are gathered and the
// result is sparse. If one is dense, the result is dense.
//
// `like` gives shape and type of the gradients that are undefined. Collective.
std::vector<at::Tensor> average_sparse(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& like,
                                       int64_t group);

}  // namespace smd::torch_ext
