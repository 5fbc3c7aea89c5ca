// Gradients of parameters that autocast casts, added up.
#pragma once

#include <ATen/core/Tensor.h>

namespace smd::torch_ext {

// Adds `addend` to the gradient `total`, in one pass also where that is wider.
void add_to(const at::Tensor& total, const at::Tensor& addend);

}  // namespace smd::torch_ext
