// Accumulates the gradients of parameters that autocast has cast, in one pass.
//
// The gradient of a cast parameter has the narrow type, and there is one for each microbatch. PyTorch widens it into
// temporary memory and adds that to `.grad`. Here the narrow gradient is added directly. Widening is exact, so the sum
// has the same bits, with about half of the memory traffic. On devices a kernel of the core loads whole vectors of both
// types.
//
// - ACC-1: casts are found in the graph of a stage's first microbatch. The other microbatches have the same casts
//   (EXE-4). Parameters that each microbatch casts anew, outside of autocast or in a recomputed forward, accumulate as
//   in PyTorch.
// - ACC-2: a parameter with hooks on its gradient accumulates as in PyTorch, because a hook must see each gradient.

#include "weight_gradients/accumulation.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "adapter.h"
#include "boxed.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

using torch::autograd::variable_list;

// The smallest gradient, in elements, for which this pays. For smaller ones the kernel launches dominate.
constexpr int64_t kLeastElems = 1 << 16;

// Whether the core has a kernel that adds `addend` to `total`.
bool has_kernel(const at::Tensor& total, const at::Tensor& addend) {
  const auto type = addend.scalar_type();
  return total.is_cuda() && total.layout() == at::kStrided && total.scalar_type() == at::kFloat &&
         (type == at::kHalf || type == at::kBFloat16) && addend.device() == total.device() &&
         addend.sizes() == total.sizes() && addend.strides() == total.strides() &&
         total.is_non_overlapping_and_dense() && !addend.is_neg() && !total.is_neg();
}

// Runs before the backward of a cast. If the hook has added the gradient itself, the cast gets none.
class AccumulationHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit AccumulationHook(at::Tensor parameter) : parameter_(std::move(parameter)) {}

  variable_list operator()(const variable_list& gradients) override {
    const auto& gradient = gradients.at(0);
    const auto& total = parameter_.grad();
    // The first gradient becomes `.grad`. With `create_graph`, PyTorch must accumulate.
    if (!total.defined() || !gradient.defined() || at::GradMode::is_enabled()) return gradients;
    if (total.layout() != at::kStrided || gradient.layout() != at::kStrided) return gradients;
    // The parameter was moved to another device in the forward; the backward moves its gradient back.
    if (total.device() != gradient.device()) return gradients;
    if (c10::promoteTypes(total.scalar_type(), gradient.scalar_type()) != total.scalar_type()) return gradients;
    add_to(total, gradient);
    return {at::Tensor()};
  }

 private:
  at::Tensor parameter_;
};

// Returns the parameter that `node` casts; undefined if it is no cast of a parameter.
at::Tensor cast_parameter(const torch::autograd::Node& node) {
  if (node.num_outputs() != 1) return {};
  const auto* accumulator = dynamic_cast<torch::autograd::AccumulateGrad*>(node.next_edge(0).function.get());
  return accumulator == nullptr || node.name() != "ToCopyBackward0" ? at::Tensor() : accumulator->variable;
}

bool has_hooks(const at::Tensor& parameter) {
  return !torch::autograd::impl::hooks(parameter).empty() ||
         torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr;
}

// Calls `use` with each cast of a parameter that `roots` depend on: its node and the parameter.
template <class Use>
void for_each_cast(const std::vector<at::Tensor>& roots, Use use) {
  std::vector<torch::autograd::Node*> stack;
  std::unordered_set<torch::autograd::Node*> known;
  const auto visit = [&](torch::autograd::Node* node) {
    if (node != nullptr && known.insert(node).second) stack.push_back(node);
  };
  for (const auto& root : roots) visit(root.grad_fn().get());
  while (!stack.empty()) {
    auto* node = stack.back();
    stack.pop_back();
    if (auto parameter = cast_parameter(*node); parameter.defined()) {
      use(*node, std::move(parameter));
      continue;
    }
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
}

// Installs the hook on the casts of parameters that `roots` depend on. It acts from the second backward on.
void accumulate_casts(const std::vector<at::Tensor>& roots) {
  for_each_cast(roots, [](torch::autograd::Node& node, at::Tensor parameter) {
    if (parameter.numel() < kLeastElems || has_hooks(parameter)) return;
    node.add_pre_hook(std::make_unique<AccumulationHook>(std::move(parameter)));
  });
}

// Returns the parameters in float32 whose casts to `type` `roots` depend on.
std::vector<at::Tensor> cast_parameters(const std::vector<at::Tensor>& roots, int64_t type) {
  std::vector<at::Tensor> found;
  for_each_cast(roots, [&](torch::autograd::Node& node, at::Tensor parameter) {
    const auto cast = node.input_metadata(0).options().dtype();
    if (parameter.scalar_type() == at::kFloat && c10::typeMetaToScalarType(cast) == static_cast<at::ScalarType>(type)) {
      found.push_back(std::move(parameter));
    }
  });
  return found;
}

// Returns autocast's cast of a parameter; adds it to autocast's cache, if that is enabled.
at::Tensor autocast_cast(const at::Tensor& parameter) {
  const auto device = parameter.device().type();
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), parameter, device);
}

}  // namespace

void add_to(const at::Tensor& total, const at::Tensor& addend) {
  const at::NoGradGuard no_grad;
  if (has_kernel(total, addend)) {
    checked([&] { accumulate(describe(total), describe(addend)); });
    total.unsafeGetTensorImpl()->bump_version();
  } else {
    total.add_(addend);
  }
}

bool adds_up(const torch::autograd::FunctionPreHook& hook) {
  return dynamic_cast<const AccumulationHook*>(&hook) != nullptr;
}

TORCH_LIBRARY_FRAGMENT(smd, m) {
  m.def("accumulate_casts(Tensor[] roots) -> ()");
  m.def("cast_parameters(Tensor[] roots, ScalarType type) -> Tensor[]");
  m.def("autocast_cast(Tensor parameter) -> Tensor");
}

TORCH_LIBRARY_IMPL(smd, CompositeExplicitAutograd, m) { m.impl("accumulate_casts", boxed<&accumulate_casts>()); }

// They return tensors that require gradients, so they run above autograd's dispatch key.
TORCH_LIBRARY_IMPL(smd, CompositeImplicitAutograd, m) {
  m.impl("cast_parameters", boxed<&cast_parameters>());
  m.impl("autocast_cast", boxed<&autocast_cast>());
}

}  // namespace smd::torch_ext
