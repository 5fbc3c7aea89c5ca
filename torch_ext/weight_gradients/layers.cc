#include "weight_gradients/layers.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <typeinfo>
#include <utility>

namespace smd::torch_ext {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
namespace nodes = torch::autograd::generated;

namespace {

template <class Kind>
Kind* as(Node* node) {
  return typeid(*node) == typeid(Kind) ? static_cast<Kind*>(node) : nullptr;
}

// A saved tensor that is kept until its product is computed. Autograd's version check does not cover that time, so this
// class does it.
class VersionCheckedTensor {
 public:
  // Unpacks `saved`, which the autograd node will unpack again. Saved-tensor hooks of the script may allow that only
  // once.
  explicit VersionCheckedTensor(SavedVariable& saved) {
    auto tensor = saved.unpack();
    if (saved.has_hooks()) saved = SavedVariable(tensor, false);
    tensor_ = tensor.detach();
    version_ = tensor_._version();
  }

  const at::Tensor& get(const WeightView& weight) const {
    // Python recognises the error by the words that autograd uses for its own check.
    TORCH_CHECK(tensor_._version() == version_,
                "the input of a layer has been modified by an inplace operation between the two parts of its "
                "zero-bubble backward: one of shape ",
                tensor_.sizes(), ", for a weight of shape ", weight.parameter().sizes());
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  decltype(at::Tensor()._version()) version_;
};

// The product `first @ second` of matrices or of batches of them, one of which is a weight. The operands are saved only
// if the other one needs a gradient.
std::optional<Layer> product_of(Node* node, std::size_t edge, SavedVariable& first, SavedVariable& second,
                                const Tensors& inputs) {
  if (auto view = WeightView::behind(node->next_edge(edge + 1), inputs)) {
    auto product = [view = *view, &first](const at::Tensor& gradient) {
      return [view, gradient, rows = VersionCheckedTensor(first)] { view.add_product(rows.get(view).mT(), gradient); };
    };
    return Layer{node, edge + 1, view->accumulator(), std::move(product)};
  }
  if (auto view = WeightView::behind(node->next_edge(edge), inputs)) {
    auto product = [view = *view, &second](const at::Tensor& gradient) {
      return [view, gradient, columns = VersionCheckedTensor(second)] {
        view.add_product(gradient, columns.get(view).mT());
      };
    };
    return Layer{node, edge, view->accumulator(), std::move(product)};
  }
  return std::nullopt;
}

// Groups of rows, each multiplied by its own matrix of a weight with three dimensions.
std::optional<Layer> grouped_product(nodes::GroupedMmBackward0* node, const Tensors& inputs) {
  auto view = WeightView::behind(node->next_edge(1), inputs);
  if (!view || node->self_sym_sizes.size() != 2 || node->mat2_sym_sizes.size() != 3) return std::nullopt;
  auto product = [node, view = *view](const at::Tensor& gradient) {
    return [view, gradient, rows = VersionCheckedTensor(node->self_), ends = VersionCheckedTensor(node->offs_)] {
      if (view.is_transposed()) {
        view.add(at::_grouped_mm(gradient.mT(), rows.get(view), ends.get(view)).mT());
      } else {
        view.add(at::_grouped_mm(rows.get(view).mT(), gradient, ends.get(view)));
      }
    };
  };
  return Layer{node, 1, view->accumulator(), std::move(product)};
}

std::optional<Layer> convolution(nodes::ConvolutionBackward0* node, const Tensors& inputs) {
  auto view = WeightView::behind(node->next_edge(1), inputs);
  if (!view) return std::nullopt;
  auto product = [node, view = *view](const at::Tensor& gradient) {
    return [view, gradient, input = VersionCheckedTensor(node->input_), weight = VersionCheckedTensor(node->weight_),
            stride = node->stride, padding = node->padding, dilation = node->dilation, transposed = node->transposed,
            output_padding = node->output_padding, groups = node->groups] {
      const auto found =
          at::convolution_backward_symint(gradient, input.get(view), weight.get(view), c10::nullopt, stride, padding,
                                          dilation, transposed, output_padding, groups, {false, true, false});
      view.add(std::get<1>(found));
    };
  };
  return Layer{node, 1, view->accumulator(), std::move(product)};
}

std::optional<Layer> embedding(nodes::EmbeddingBackward0* node, const Tensors& inputs) {
  auto view = WeightView::behind(node->next_edge(0), inputs);
  if (!view || node->sparse) return std::nullopt;
  auto product = [node, view = *view](const at::Tensor& gradient) {
    return [view, gradient, indices = VersionCheckedTensor(node->indices_), rows = node->weight_sym_argsize_0,
            padding = node->padding_idx, scales = node->scale_grad_by_freq] {
      view.add(at::embedding_dense_backward_symint(gradient, indices.get(view), rows, padding, scales));
    };
  };
  return Layer{node, 0, view->accumulator(), std::move(product)};
}

}  // namespace

std::optional<Layer> layer_of(Node* node, const Tensors& inputs) {
  // With complex numbers, the gradient of a real weight needs autograd's projection to its real part.
  if (node->num_inputs() == 0 || !at::isFloatingType(node->input_metadata(0).dtype().toScalarType()))
    return std::nullopt;
  if (auto* linear = as<nodes::AddmmBackward0>(node)) {
    return linear->alpha.equal(1) ? product_of(node, 1, linear->mat1_, linear->mat2_, inputs) : std::nullopt;
  }
  if (auto* batched = as<nodes::BaddbmmBackward0>(node)) {
    return batched->alpha.equal(1) ? product_of(node, 1, batched->batch1_, batched->batch2_, inputs) : std::nullopt;
  }
  if (auto* product = as<nodes::MmBackward0>(node)) return product_of(node, 0, product->self_, product->mat2_, inputs);
  if (auto* batched = as<nodes::BmmBackward0>(node)) return product_of(node, 0, batched->self_, batched->mat2_, inputs);
  if (auto* grouped = as<nodes::GroupedMmBackward0>(node)) return grouped_product(grouped, inputs);
  if (auto* spread = as<nodes::ConvolutionBackward0>(node)) return convolution(spread, inputs);
  if (auto* lookup = as<nodes::EmbeddingBackward0>(node)) return embedding(lookup, inputs);
  return std::nullopt;
}

bool is_lookup(Node& node) {
  return typeid(node) == typeid(nodes::EmbeddingBackward0) || typeid(node) == typeid(nodes::EmbeddingBagBackward0);
}

}  // namespace smd::torch_ext
