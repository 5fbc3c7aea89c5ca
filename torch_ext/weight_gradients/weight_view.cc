#include "weight_gradients/weight_view.h"

#include <ATen/TensorUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <typeinfo>
#include <utility>

#include "compat.h"
#include "weight_gradients/accumulation.h"

namespace smd::torch_ext {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::utils::obeys_layout_contract;
namespace nodes = torch::autograd::generated;

namespace {

template <class Kind>
Kind* as(Node& node) {
  return typeid(node) == typeid(Kind) ? static_cast<Kind*>(&node) : nullptr;
}

template <class... Kinds>
bool is_one_of(Node& node) {
  return ((typeid(node) == typeid(Kinds)) || ...);
}

// Operations that keep each element at its index.
bool keeps_indices(Node& node) {
  return is_one_of<nodes::ToCopyBackward0, nodes::CloneBackward0, nodes::AliasBackward0>(node);
}

// Operations that keep the order of the elements.
bool keeps_order(Node& node) {
  return is_one_of<nodes::ViewBackward0, nodes::ReshapeAliasBackward0, nodes::UnsafeViewBackward0,
                   nodes::SqueezeBackward0>(node);
}

bool is_plain(const at::Tensor& parameter) {
  using torch::autograd::impl::hooks;
  using torch::autograd::impl::post_acc_grad_hooks;
  return parameter.layout() == at::kStrided && !parameter.key_set().has(c10::DispatchKey::Python) &&
         parameter.is_non_overlapping_and_dense() && at::isFloatingType(parameter.scalar_type()) &&
         compat::has_own_grad_dtype(parameter, compat::Preferred()) && hooks(parameter).empty() &&
         post_acc_grad_hooks(parameter) == nullptr;
}

bool is_column_major(const at::Tensor& matrices) {
  return matrices.dim() >= 2 && matrices.stride(-1) != 1 && matrices.stride(-2) == 1;
}

// Writes the product of two matrices, or of two batches of matrices, to `out`, or adds it.
void multiply(at::Tensor out, at::Tensor left, at::Tensor right, bool adds) {
  if (is_column_major(out)) {
    // The transposed product has the layout that BLAS libraries write.
    out = out.mT();
    auto first = right.mT();
    right = left.mT();
    left = std::move(first);
  }
  const bool widens = left.scalar_type() != out.scalar_type();
  if (left.dim() == 2) {
    if (adds) {
      widens ? at::addmm_out(out, out, left, right, out.scalar_type()) : at::addmm_out(out, out, left, right);
    } else {
      widens ? at::mm_out(out, left, right, out.scalar_type()) : at::mm_out(out, left, right);
    }
  } else if (adds) {
    widens ? at::baddbmm_out(out, out, left, right, out.scalar_type()) : at::baddbmm_out(out, out, left, right);
  } else {
    widens ? at::bmm_out(out, left, right, out.scalar_type()) : at::bmm_out(out, left, right);
  }
}

}  // namespace

bool is_watched(Node& node) {
  const auto& before = node.pre_hooks();
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.post_hooks().empty() ||
         std::any_of(before.begin(), before.end(), [](const auto& hook) { return !adds_up(*hook); });
}

bool only_moves_elements(Node& node) {
  return keeps_indices(node) || keeps_order(node) ||
         is_one_of<nodes::TBackward0, nodes::TransposeBackward0, nodes::PermuteBackward0, nodes::UnsqueezeBackward0,
                   nodes::SqueezeBackward1, nodes::SelectBackward0, nodes::SliceBackward0, nodes::SplitBackward0,
                   nodes::SplitWithSizesBackward0, nodes::UnbindBackward0>(node);
}

// Returns the operation whose backward is `node`, for the node's output of this number.
std::optional<WeightView::Step> WeightView::step_of(Node& node, std::uint32_t output) {
  const auto step = [](std::function<at::Tensor(const at::Tensor&)> apply) { return Step{std::move(apply), {}}; };
  if (as<nodes::TBackward0>(node) != nullptr) {
    return step([](const at::Tensor& tensor) { return tensor.t(); });
  }
  if (const auto* found = as<nodes::TransposeBackward0>(node)) {
    return step(
        [one = found->dim0, other = found->dim1](const at::Tensor& tensor) { return tensor.transpose(one, other); });
  }
  if (const auto* found = as<nodes::PermuteBackward0>(node)) {
    return step([dims = found->dims](const at::Tensor& tensor) { return tensor.permute(dims); });
  }
  if (const auto* found = as<nodes::UnsqueezeBackward0>(node)) {
    return step([dim = found->dim](const at::Tensor& tensor) { return tensor.unsqueeze(dim); });
  }
  if (const auto* found = as<nodes::SqueezeBackward1>(node)) {
    return step([dim = found->dim](const at::Tensor& tensor) { return tensor.squeeze(dim); });
  }
  if (const auto* found = as<nodes::SelectBackward0>(node)) {
    return step([dim = found->dim, index = found->index](const at::Tensor& tensor) {
      return tensor.select_symint(dim, index);
    });
  }
  if (const auto* found = as<nodes::SliceBackward0>(node)) {
    return step([dim = found->dim, begin = found->start, end = found->end, by = found->step](const at::Tensor& tensor) {
      return tensor.slice_symint(dim, begin, end, by);
    });
  }
  if (const auto* found = as<nodes::SplitBackward0>(node)) {
    return step([dim = found->dim, size = found->split_size, output](const at::Tensor& tensor) {
      return tensor.slice_symint(dim, size * output, size * (output + 1));
    });
  }
  if (const auto* found = as<nodes::SplitWithSizesBackward0>(node)) {
    const auto& sizes = found->split_sizes;
    const auto begin = std::accumulate(sizes.begin(), sizes.begin() + output, c10::SymInt(0));
    return step([dim = found->dim, begin, size = sizes[output]](const at::Tensor& tensor) {
      return tensor.narrow_symint(dim, begin, size);
    });
  }
  if (const auto* found = as<nodes::UnbindBackward0>(node)) {
    return step([dim = found->dim, output](const at::Tensor& tensor) { return tensor.select(dim, output); });
  }
  if (keeps_order(node)) {
    std::vector<int64_t> sizes;
    for (const auto& size : node.input_metadata(output).shape_as_dim_vector()) {
      sizes.push_back(size.guard_int(__FILE__, __LINE__));
    }
    return Step{[sizes](const at::Tensor& tensor) { return tensor.view(sizes); }, sizes};
  }
  return std::nullopt;
}

std::optional<WeightView> WeightView::behind(const Edge& edge, const Tensors& inputs) {
  WeightView view;
  auto* node = edge.function.get();
  auto output = edge.input_nr;
  while (node != nullptr && !is_watched(*node)) {
    view.accumulator_ = dynamic_cast<AccumulateGrad*>(node);
    if (view.accumulator_ != nullptr) {
      view.parameter_ = view.accumulator_->variable;
      std::reverse(view.steps_.begin(), view.steps_.end());
      const bool is_input = inputs.count(view.parameter_.unsafeGetTensorImpl()) != 0;
      if (is_input || !is_plain(view.parameter_) || !view.fits()) return std::nullopt;
      return view;
    }
    if (!keeps_indices(*node)) {
      auto step = step_of(*node, output);
      if (!step) return std::nullopt;
      view.steps_.push_back(std::move(*step));
    }
    const auto& next = node->next_edge(0);
    node = next.function.get();
    output = next.input_nr;
  }
  return std::nullopt;
}

bool WeightView::fits() const {
  const auto reshapes = [](const Step& step) { return step.sizes.has_value(); };
  if (std::none_of(steps_.begin(), steps_.end(), reshapes)) return true;
  const at::NoGradGuard no_grad;
  auto tensor = parameter_.detach();
  for (const auto& step : steps_) {
    if (step.sizes && !at::detail::computeStride(tensor.sizes(), tensor.strides(), *step.sizes)) return false;
    tensor = step.apply(tensor);
  }
  return true;
}

at::Tensor WeightView::of(const at::Tensor& whole) const {
  auto tensor = whole;
  for (const auto& step : steps_) tensor = step.apply(tensor);
  return tensor;
}

bool WeightView::is_transposed() const {
  const at::NoGradGuard no_grad;
  return is_column_major(of(parameter_.detach()));
}

at::Tensor WeightView::empty_gradient(int64_t elems, at::ScalarType type, c10::Device device) const {
  const auto options = at::TensorOptions().dtype(type).device(device);
  return elems == parameter_.numel() ? at::empty_like(parameter_, options) : at::zeros_like(parameter_, options);
}

void WeightView::add_product(const at::Tensor& left, const at::Tensor& right) const {
  // Products of sparse tensors have no form that writes into a tensor.
  if (left.layout() != at::kStrided || right.layout() != at::kStrided) {
    return add(left.dim() == 2 ? at::mm(left, right) : at::bmm(left, right));
  }
  auto& total = parameter_.mutable_grad();
  const auto type = left.scalar_type();
  const auto wide = parameter_.scalar_type();
  const bool alike = type == wide;
  const bool widens = left.is_cuda() && (type == at::kHalf || type == at::kBFloat16) && wide == at::kFloat;
  const bool is_here = left.device() == parameter_.device();
  if (is_here && (alike || widens) && total.defined() && total.layout() == at::kStrided &&
      total.device() == parameter_.device() && total.scalar_type() == wide &&
      obeys_layout_contract(total, parameter_)) {
    multiply(of(total), left, right, true);
    return;
  }
  const bool is_first = is_here && !total.defined();
  const auto elems = left.numel() / std::max<int64_t>(left.size(-1), 1) * right.size(-1);
  auto product = empty_gradient(elems, is_first && widens ? wide : type, left.device());
  multiply(of(product), left, right, false);
  add_whole(product);
}

void WeightView::add(const at::Tensor& gradient) const {
  auto& total = parameter_.mutable_grad();
  if (total.defined() && total.layout() == at::kStrided && total.device() == gradient.device() &&
      c10::promoteTypes(total.scalar_type(), gradient.scalar_type()) == total.scalar_type() &&
      obeys_layout_contract(total, parameter_)) {
    add_to(of(total), gradient);
    return;
  }
  auto whole = empty_gradient(gradient.numel(), gradient.scalar_type(), gradient.device());
  of(whole).copy_(gradient);
  add_whole(whole);
}

void WeightView::add_whole(const at::Tensor& gradient) const {
  auto& total = parameter_.mutable_grad();
  const auto here = gradient.to(parameter_.device());
  if (!total.defined()) {
    total = here.to(parameter_.scalar_type());
  } else if (total.is_sparse()) {
    total = here.to(parameter_.scalar_type()) + total;
  } else {
    add_to(total, here);
  }
}

}  // namespace smd::torch_ext
