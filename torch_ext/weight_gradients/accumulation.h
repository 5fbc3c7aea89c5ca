// Accumulates the gradients of parameters that autocast casts.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace smd::torch_ext {

// Adds `addend` to the gradient `total` in one pass, also where `total` has a wider element type.
void add_to(const at::Tensor& total, const at::Tensor& addend);

// Whether `hook` is the hook that accumulates the gradients of a cast.
bool adds_up(const torch::autograd::FunctionPreHook& hook);

}  // namespace smd::torch_ext
