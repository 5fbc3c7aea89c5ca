// Layers whose weight gradients can be computed apart from autograd's graph.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <functional>
#include <optional>

#include "weight_gradients/weight_view.h"

namespace smd::torch_ext {

// An autograd node with a weight.
struct Layer {
  torch::autograd::Node* node;
  // The index of the node's edge to the weight.
  std::size_t edge;
  torch::autograd::AccumulateGrad* accumulator;
  // Takes the node's incoming gradient; returns the computation that adds to the weight's gradient.
  std::function<std::function<void()>(const at::Tensor&)> product;
};

// Describes `node` as a layer, if its weight's gradient can be computed separately: products of matrices, of batches of
// matrices and of groups of rows, convolutions, and embeddings. Leaves in `inputs` are no weights.
std::optional<Layer> layer_of(torch::autograd::Node* node, const Tensors& inputs);

// Whether the node looks up rows of a weight, whose gradient is cheap.
bool is_lookup(torch::autograd::Node& node);

}  // namespace smd::torch_ext
