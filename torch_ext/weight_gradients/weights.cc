#include "weight_gradients/weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "boxed.h"
#include "compat.h"
#include "weight_gradients/accumulation.h"

namespace smd::torch_ext {

using torch::autograd::AccumulateGrad;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
namespace nodes = torch::autograd::generated;

// The products that hooks have queued and `run` computes. Lives as long as the hooks or the owner.
struct WeightGradients::Pending {
  bool later = false;
  // Hooks run on autograd's threads.
  std::mutex mutex;
  std::vector<std::function<void()>> products;
  // The storages of gradients that the queued products need.
  std::unordered_set<const c10::StorageImpl*> held;
};

namespace {

template <class Kind>
Kind* as(Node* node) {
  return typeid(*node) == typeid(Kind) ? static_cast<Kind*>(node) : nullptr;
}

// Adds `product` to the gradient of `weight`.
void add_gradient(const at::Tensor& weight, const at::Tensor& product) {
  auto& total = weight.mutable_grad();
  const auto here = product.to(weight.device());
  if (total.defined() && total.is_sparse()) {
    total = here.to(weight.scalar_type()) + total;
  } else if (total.defined()) {
    add_to(total, here);
  } else {
    total = here.to(weight.scalar_type());
  }
}

// Adds the matrix product of `left` and `right` to the gradient of `weight`.
void add_product(const at::Tensor& weight, const at::Tensor& left, const at::Tensor& right) {
  auto& total = weight.mutable_grad();
  const auto type = left.scalar_type();
  const bool alike = type == weight.scalar_type();
  const bool widens =
      left.is_cuda() && (type == at::kHalf || type == at::kBFloat16) && weight.scalar_type() == at::kFloat;
  const bool fits = left.device() == weight.device() &&
                    (!total.defined() || (total.layout() == at::kStrided && total.device() == weight.device() &&
                                          total.scalar_type() == weight.scalar_type()));
  if (!fits || !(alike || widens)) {
    add_gradient(weight, at::mm(left, right));
  } else if (!total.defined()) {
    total = alike ? at::mm(left, right) : at::mm(left, right, at::kFloat);
  } else if (alike) {
    total.addmm_(left, right);
  } else {
    at::addmm_out(total, total, left, right, at::kFloat);
  }
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

  const at::Tensor& get(const at::Tensor& weight) const {
    // Python recognises the error by the words that autograd uses for its own check.
    TORCH_CHECK(tensor_._version() == version_,
                "the input of a layer has been modified by an inplace operation between the two parts of its "
                "zero-bubble backward: one of shape ",
                tensor_.sizes(), ", for a weight of shape ", weight.sizes());
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  decltype(at::Tensor()._version()) version_;
};

// An autograd node with a weight. `product` returns the computation of the weight's gradient from the node's incoming
// gradient.
struct Layer {
  Node* node;
  // The index of the node's edge to the weight.
  std::size_t edge;
  AccumulateGrad* accumulator;
  std::function<std::function<void()>(const at::Tensor&)> product;
};

// Whether a hook of the script runs at the node. Our own hooks on casts do not count.
bool is_watched(Node& node) {
  const auto& before = node.pre_hooks();
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.post_hooks().empty() ||
         std::any_of(before.begin(), before.end(), [](const auto& hook) { return !adds_up(*hook); });
}

// Returns the accumulator that an edge leads to, and whether the weight is transposed on the way. Only casts of
// autocast may lie between.
std::pair<AccumulateGrad*, bool> weight_at(const torch::autograd::Edge& edge) {
  auto* node = edge.function.get();
  bool transposed = false;
  if (node != nullptr && as<nodes::TBackward0>(node) != nullptr) {
    if (is_watched(*node)) return {nullptr, false};
    transposed = true;
    node = node->next_edge(0).function.get();
  }
  if (node != nullptr && as<nodes::ToCopyBackward0>(node) != nullptr) {
    if (is_watched(*node)) return {nullptr, false};
    node = node->next_edge(0).function.get();
  }
  auto* accumulator = node == nullptr ? nullptr : dynamic_cast<AccumulateGrad*>(node);
  return {accumulator != nullptr && !is_watched(*accumulator) ? accumulator : nullptr, transposed};
}

bool is_plain(const at::Tensor& weight) {
  using torch::autograd::impl::hooks;
  using torch::autograd::impl::post_acc_grad_hooks;
  return weight.layout() == at::kStrided && !weight.key_set().has(c10::DispatchKey::Python) && weight.is_contiguous() &&
         at::isFloatingType(weight.scalar_type()) && compat::has_own_grad_dtype(weight, compat::Preferred()) &&
         hooks(weight).empty() && post_acc_grad_hooks(weight) == nullptr;
}

std::optional<Layer> matrix_layer(Node* node, std::size_t edge, SavedVariable& input) {
  const auto [accumulator, transposed] = weight_at(node->next_edge(edge));
  if (accumulator == nullptr || !is_plain(accumulator->variable)) return std::nullopt;
  auto product = [weight = accumulator->variable, transposed = transposed, &input](const at::Tensor& gradient) {
    return [weight, transposed, gradient, rows = VersionCheckedTensor(input)] {
      if (transposed) {
        add_product(weight, gradient.t(), rows.get(weight));
      } else {
        add_product(weight, rows.get(weight).t(), gradient);
      }
    };
  };
  return Layer{node, edge, accumulator, std::move(product)};
}

std::optional<Layer> convolution(nodes::ConvolutionBackward0* node) {
  const auto [accumulator, transposed] = weight_at(node->next_edge(1));
  if (accumulator == nullptr || transposed || !is_plain(accumulator->variable)) return std::nullopt;
  auto product = [node, weight = accumulator->variable](const at::Tensor& gradient) {
    return [weight, gradient, input = VersionCheckedTensor(node->input_), narrow = VersionCheckedTensor(node->weight_),
            stride = node->stride, padding = node->padding, dilation = node->dilation, transposed = node->transposed,
            output_padding = node->output_padding, groups = node->groups] {
      const auto found =
          at::convolution_backward_symint(gradient, input.get(weight), narrow.get(weight), c10::nullopt, stride,
                                          padding, dilation, transposed, output_padding, groups, {false, true, false});
      add_gradient(weight, std::get<1>(found));
    };
  };
  return Layer{node, 1, accumulator, std::move(product)};
}

// Describes `node` as a layer, if its weight's gradient can be computed separately.
std::optional<Layer> layer_of(Node* node) {
  // With complex numbers, the gradient of a real weight needs autograd's projection to its real part.
  if (node->num_inputs() == 0 || !at::isFloatingType(node->input_metadata(0).dtype().toScalarType()))
    return std::nullopt;
  if (auto* linear = as<nodes::AddmmBackward0>(node)) {
    return linear->alpha.equal(1) ? matrix_layer(node, 2, linear->mat1_) : std::nullopt;
  }
  if (auto* product = as<nodes::MmBackward0>(node)) return matrix_layer(node, 1, product->self_);
  if (auto* spread = as<nodes::ConvolutionBackward0>(node)) return convolution(spread);
  return std::nullopt;
}

// A pre-hook of a layer's autograd node: queues the product that computes the weight gradient, or computes it at once.
class ProductHook final : public FunctionPreHook {
 public:
  ProductHook(std::shared_ptr<WeightGradients::Pending> pending,
              std::function<std::function<void()>(const at::Tensor&)> product)
      : pending_(std::move(pending)), product_(std::move(product)) {}

  variable_list operator()(const variable_list& gradients) override {
    const auto& gradient = gradients.at(0);
    if (!gradient.defined()) return gradients;
    auto product = product_(gradient);
    const std::lock_guard lock(pending_->mutex);
    if (pending_->later) {
      pending_->products.push_back(std::move(product));
      if (gradient.has_storage()) pending_->held.insert(gradient.storage().unsafeGetStorageImpl());
    } else {
      compute(product);
    }
    return gradients;
  }

  static void compute(const std::function<void()>& product) {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    product();
  }

 private:
  std::shared_ptr<WeightGradients::Pending> pending_;
  std::function<std::function<void()>(const at::Tensor&)> product_;
};

// Searches an autograd graph from its roots.
class Search {
 public:
  // Returns false for a graph in which backward cannot be given a list of inputs.
  bool look(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& inputs) {
    for (const auto& input : inputs) inputs_.insert(input.unsafeGetTensorImpl());
    for (const auto& root : roots) {
      if (root.grad_fn() != nullptr) {
        visit(root.grad_fn().get());
      } else if (root.requires_grad()) {
        // Holds the accumulator, because no other object may do so.
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(root));
        visit(accumulators_.back().get());
      }
    }
    while (!stack_.empty()) {
      auto [node, left] = stack_.back();
      stack_.pop_back();
      if (left) {
        leave(node);
      } else if (!enter(node)) {
        return false;
      }
    }
    return true;
  }

  // The layers to whose weights no other path leads (WGT-2).
  std::vector<Layer> layers() {
    std::vector<Layer> found;
    for (auto& layer : taken_) {
      if (known_.count(layer.accumulator) == 0) found.push_back(std::move(layer));
    }
    return found;
  }

  std::vector<at::Tensor> leaves;

 private:
  void visit(Node* node) {
    if (known_.count(node) == 0) stack_.emplace_back(node, false);
  }

  bool enter(Node* node) {
    // Another path may have reached the node in the meantime.
    if (!known_.emplace(node, false).second) return true;
    if (auto* accumulator = dynamic_cast<AccumulateGrad*>(node)) {
      known_[node] = true;
      leaves.push_back(accumulator->variable);
      return true;
    }
    // Checkpoints that run a backward of their own refuse a backward with inputs. They are recognised by name, because
    // scripts derive their classes from PyTorch's.
    if (node->name().find("Checkpoint") != std::string::npos) return false;
    stack_.emplace_back(node, true);
    auto layer = layer_of(node);
    if (layer && inputs_.count(layer->accumulator->variable.unsafeGetTensorImpl()) != 0) layer.reset();
    for (std::size_t edge = 0; edge < node->num_outputs(); ++edge) {
      auto* child = node->next_edge(edge).function.get();
      if (child != nullptr && !(layer && layer->edge == edge)) visit(child);
    }
    if (layer) layers_.emplace(node, std::move(*layer));
    return true;
  }

  // Called when all nodes that follow `node` have been visited.
  void leave(Node* node) {
    const auto layer = layers_.find(node);
    const auto edge = layer == layers_.end() ? node->num_outputs() : layer->second.edge;
    bool reaches = false;
    for (std::size_t each = 0; each < node->num_outputs(); ++each) {
      auto* child = node->next_edge(each).function.get();
      reaches = reaches || (each != edge && child != nullptr && known_[child]);
    }
    if (layer != layers_.end() && reaches) {
      taken_.push_back(std::move(layer->second));
    } else if (layer != layers_.end()) {
      visit(layer->second.accumulator);
      reaches = true;
    }
    known_[node] = reaches;
  }

  std::unordered_set<const c10::TensorImpl*> inputs_;
  std::vector<compat::NodePtr> accumulators_;
  // Visited nodes, and for each whether it leads to a leaf.
  std::unordered_map<Node*, bool> known_;
  std::vector<std::pair<Node*, bool>> stack_;
  std::unordered_map<Node*, Layer> layers_;
  std::vector<Layer> taken_;
};

}  // namespace

WeightGradients::WeightGradients(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& inputs)
    : pending_(std::make_shared<Pending>()) {
  Search search;
  if (!search.look(roots, inputs)) return;
  for (auto& layer : search.layers()) {
    layer.node->add_pre_hook(std::make_unique<ProductHook>(pending_, std::move(layer.product)));
    ++size_;
  }
  leaves_ = std::move(search.leaves);
}

std::vector<at::Tensor> WeightGradients::begin(bool later) {
  pending_->later = later;
  // Released at the end: leaves hold their gradients, which may be freed before the noted products are computed.
  auto leaves = std::exchange(leaves_, {});
  if (later) {
    for (const auto& leaf : leaves) {
      if (!leaf.grad().defined()) fresh_.push_back(leaf);
    }
  }
  return leaves;
}

void WeightGradients::end() {
  const auto& held = pending_->held;
  for (const auto& leaf : std::exchange(fresh_, {})) {
    auto& gradient = leaf.mutable_grad();
    if (gradient.defined() && gradient.has_storage() && held.count(gradient.storage().unsafeGetStorageImpl()) != 0) {
      gradient = gradient.clone();
    }
  }
}

void WeightGradients::run() {
  pending_->held.clear();
  for (const auto& product : std::exchange(pending_->products, {})) ProductHook::compute(product);
}

namespace {

c10::intrusive_ptr<WeightGradients> make_weight_gradients(const std::vector<at::Tensor>& roots,
                                                          const std::vector<at::Tensor>& inputs) {
  return c10::make_intrusive<WeightGradients>(roots, inputs);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(smd, m) {
  BoxedClass<WeightGradients>(m, "WeightGradients")
      .init<&make_weight_gradients>("Tensor[] roots, Tensor[] inputs")
      .def<&WeightGradients::size>("size() -> int")
      .def<&WeightGradients::begin>("begin(bool later) -> Tensor[]")
      .def<&WeightGradients::end>("end() -> NoneType")
      .def<&WeightGradients::run>("run() -> NoneType");
}

}  // namespace smd::torch_ext
