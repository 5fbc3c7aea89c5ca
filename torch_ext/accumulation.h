// Gradients of parameters that autocast casts, added up.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

namespace smd::torch_ext {

// Adds `addend` to the gradient `total`, in one pass also where that is wider.
void add_to(const at::Tensor& total, const at::Tensor& addend);

// Whether a hook is one of these, which adds up the gradients of a cast.
bool adds_up(const torch::autograd::FunctionPreHook& hook);

}  // namespace smd::torch_ext
