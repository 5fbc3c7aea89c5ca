// The view of a parameter that a layer multiplies by.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <unordered_set>
#include <vector>

namespace smd::torch_ext {

using Tensors = std::unordered_set<const c10::TensorImpl*>;

// Whether a hook of the script runs at the node. Our own hooks on casts do not count.
bool is_watched(torch::autograd::Node& node);

// Whether the node's backward returns the gradient's elements unchanged: a view, a copy, or a cast.
bool only_moves_elements(torch::autograd::Node& node);

// The operations between a parameter and a layer: transpositions, slices and other views, copies, and the casts of
// autocast. Each has a view of the gradient as its counterpart, so a product can be added to a part of `.grad` where
// autograd would first fill a tensor of the parameter's size with zeros.
class WeightView {
 public:
  // Follows `edge` of an autograd node to a parameter. Returns nothing if other operations lie between, if a hook
  // watches the way, or if the parameter's gradient is not an ordinary tensor. Leaves in `inputs` are no parameters.
  static std::optional<WeightView> behind(const torch::autograd::Edge& edge, const Tensors& inputs);

  torch::autograd::AccumulateGrad* accumulator() const { return accumulator_; }
  const at::Tensor& parameter() const { return parameter_; }
  // Adds the matrix product of `left` and `right`, or the products of their matrices, to the gradient.
  void add_product(const at::Tensor& left, const at::Tensor& right) const;
  // Adds `gradient`, which has the sizes of the view.
  void add(const at::Tensor& gradient) const;
  // Whether the elements of the view's last dimension but one are adjacent, and not those of the last.
  bool is_transposed() const;

 private:
  struct Step {
    std::function<at::Tensor(const at::Tensor&)> apply;
    // The sizes that a reshape gives, which is impossible with some strides.
    std::optional<std::vector<int64_t>> sizes;
  };

  static std::optional<Step> step_of(torch::autograd::Node& node, std::uint32_t output);
  // Whether all steps are possible with the parameter's strides: the reshape of a copy, such as a cast, may not be.
  bool fits() const;
  // The same view of `whole`, which has the parameter's sizes and strides.
  at::Tensor of(const at::Tensor& whole) const;
  // Returns a gradient of the type, in which `elems` elements will be written through the view and others are zero.
  at::Tensor empty_gradient(int64_t elems, at::ScalarType type, c10::Device device) const;
  // Adds a gradient of the whole parameter.
  void add_whole(const at::Tensor& gradient) const;

  torch::autograd::AccumulateGrad* accumulator_ = nullptr;
  at::Tensor parameter_;
  // From the parameter to the layer.
  std::vector<Step> steps_;
};

}  // namespace smd::torch_ext
