#include "weight_gradients/weights.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "boxed.h"
#include "compat.h"
#include "weight_gradients/layers.h"

namespace smd::torch_ext {

using torch::autograd::AccumulateGrad;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;

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

// A pre-hook of a layer's autograd node: queues the product that computes the weight gradient, or computes it at once.
class ProductHook final : public FunctionPreHook {
 public:
  // With `is_last`, the weight's gradient is all that the node would compute, so it gets none (WGT-2).
  ProductHook(std::shared_ptr<WeightGradients::Pending> pending, Layer& layer, bool is_last)
      : pending_(std::move(pending)), product_(std::move(layer.product)), is_last_(is_last) {}

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
    return is_last_ ? variable_list(gradients.size()) : gradients;
  }

  static void compute(const std::function<void()>& product) {
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    product();
  }

 private:
  std::shared_ptr<WeightGradients::Pending> pending_;
  std::function<std::function<void()>(const at::Tensor&)> product_;
  bool is_last_;
};

// Searches an autograd graph from its roots.
class Search {
 public:
  // Returns the node because of which a backward cannot be given a list of inputs; null if there is none.
  Node* look(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& inputs) {
    for (const auto& input : inputs) inputs_.insert(input.unsafeGetTensorImpl());
    for (const auto& root : roots) {
      if (root.grad_fn() != nullptr) {
        visit(root.grad_fn().get(), nullptr);
      } else if (root.requires_grad()) {
        // Holds the accumulator, because no other object may do so.
        accumulators_.push_back(torch::autograd::impl::grad_accumulator(root));
        visit(accumulators_.back().get(), nullptr);
      }
    }
    while (!stack_.empty()) {
      auto [node, left] = stack_.back();
      stack_.pop_back();
      if (left) {
        leave(node);
      } else if (!enter(node)) {
        return node;
      }
    }
    choose();
    return nullptr;
  }

  // Layers whose nodes compute more than the gradient of the weight, and layers whose nodes do not (WGT-2).
  std::vector<Layer> layers, last_layers;
  std::vector<at::Tensor> leaves;

  // Names the node that computes the gradient of the largest matrix within the backward, if those of most elements of
  // matrices are computed there.
  std::string unsplit_node() {
    int64_t split = 0, unsplit = 0;
    AccumulateGrad* largest = nullptr;
    std::unordered_set<AccumulateGrad*> seen;
    for (const auto* found : {&layers, &last_layers}) {
      for (const auto& layer : *found) {
        if (seen.insert(layer.accumulator).second) split += layer.accumulator->variable.numel();
      }
    }
    for (auto* accumulator : unsplit_) {
      const auto& weight = accumulator->variable;
      if (weight.dim() < 2 || inputs_.count(weight.unsafeGetTensorImpl()) != 0) continue;
      if (largest == nullptr || weight.numel() > largest->variable.numel()) largest = accumulator;
      unsplit += weight.numel();
    }
    if (unsplit <= split) return {};
    auto* node = first_users_[largest];
    while (node != nullptr && only_moves_elements(*node)) node = first_users_[node];
    std::ostringstream text;
    text << (node == nullptr ? largest : node)->name() << ", weight of shape " << largest->variable.sizes();
    return text.str();
  }

 private:
  void visit(Node* node, Node* from) {
    if (known_.count(node) != 0) return;
    first_users_.emplace(node, from);
    stack_.emplace_back(node, false);
  }

  bool enter(Node* node) {
    // Another path may have reached the node in the meantime.
    if (!known_.emplace(node, false).second) return true;
    if (auto* accumulator = dynamic_cast<AccumulateGrad*>(node)) {
      known_[node] = true;
      leaves.push_back(accumulator->variable);
      if (auto* user = first_users_[node]; user == nullptr || !is_lookup(*user)) unsplit_.push_back(accumulator);
      return true;
    }
    // Checkpoints that run a backward of their own refuse a backward with inputs. They are recognised by name, because
    // scripts derive their classes from PyTorch's.
    if (node->name().find("Checkpoint") != std::string::npos) return false;
    stack_.emplace_back(node, true);
    // A hook at the node itself may use the gradient that it returns.
    auto layer = node->post_hooks().empty() ? layer_of(node, inputs_) : std::nullopt;
    for (std::size_t edge = 0; edge < node->num_outputs(); ++edge) {
      auto* child = node->next_edge(edge).function.get();
      if (child != nullptr && !(layer && layer->edge == edge)) visit(child, node);
    }
    if (layer) candidates_.emplace(node, std::move(*layer));
    return true;
  }

  // Called when all nodes that follow `node` have been visited.
  void leave(Node* node) {
    const auto layer = candidates_.find(node);
    const auto edge = layer == candidates_.end() ? node->num_outputs() : layer->second.edge;
    bool reaches = false;
    for (std::size_t each = 0; each < node->num_outputs(); ++each) {
      auto* child = node->next_edge(each).function.get();
      reaches = reaches || (each != edge && child != nullptr && known_[child]);
    }
    if (layer != candidates_.end()) {
      (reaches ? layers : last_layers).push_back(std::move(layer->second));
      reaches = true;
    }
    known_[node] = reaches;
  }

  // Leaves the weights of `layers` to which another path leads to autograd.
  void choose() {
    for (const auto& layer : last_layers) {
      if (known_.emplace(layer.accumulator, true).second) leaves.push_back(layer.accumulator->variable);
    }
    std::vector<Layer> chosen;
    for (auto& layer : std::exchange(layers, {})) {
      if (known_.count(layer.accumulator) == 0) {
        chosen.push_back(std::move(layer));
      } else if (std::find(unsplit_.begin(), unsplit_.end(), layer.accumulator) == unsplit_.end()) {
        first_users_.emplace(layer.accumulator, layer.node);
        unsplit_.push_back(layer.accumulator);
      }
    }
    layers = std::move(chosen);
  }

  Tensors inputs_;
  std::vector<compat::NodePtr> accumulators_;
  // Visited nodes, and for each whether it leads to a leaf.
  std::unordered_map<Node*, bool> known_;
  // For each node, one of those that get its output.
  std::unordered_map<Node*, Node*> first_users_;
  std::vector<std::pair<Node*, bool>> stack_;
  std::unordered_map<Node*, Layer> candidates_;
  // Parameters whose gradients autograd computes.
  std::vector<AccumulateGrad*> unsplit_;
};

}  // namespace

WeightGradients::WeightGradients(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& inputs)
    : pending_(std::make_shared<Pending>()) {
  Search search;
  if (const auto* obstacle = search.look(roots, inputs)) {
    unsplit_node_ = obstacle->name();
    return;
  }
  unsplit_node_ = search.unsplit_node();
  const auto add_hooks = [&](std::vector<Layer>& layers, bool are_last) {
    for (auto& layer : layers) layer.node->add_pre_hook(std::make_unique<ProductHook>(pending_, layer, are_last));
    size_ += static_cast<int64_t>(layers.size());
  };
  add_hooks(search.layers, false);
  add_hooks(search.last_layers, true);
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
  for (auto& product : std::exchange(pending_->products, {})) {
    // Frees its tensors before the next one needs memory.
    ProductHook::compute(std::exchange(product, nullptr));
  }
}

namespace {

c10::intrusive_ptr<WeightGradients> make_weight_gradients(const std::vector<at::Tensor>& roots,
                                                          const std::vector<at::Tensor>& inputs) {
  return c10::make_intrusive<WeightGradients>(roots, inputs);
}

// Whether other tensors have the same memory.
bool shares_memory(const at::Tensor& tensor) { return tensor.has_storage() && tensor.storage().use_count() > 1; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(smd, m) {
  m.def("shares_memory(Tensor tensor) -> bool");
  BoxedClass<WeightGradients>(m, "WeightGradients")
      .init<&make_weight_gradients>("Tensor[] roots, Tensor[] inputs")
      .def<&WeightGradients::size>("size() -> int")
      .def<&WeightGradients::unsplit_node>("unsplit_node() -> str")
      .def<&WeightGradients::begin>("begin(bool later) -> Tensor[]")
      .def<&WeightGradients::end>("end() -> NoneType")
      .def<&WeightGradients::run>("run() -> NoneType");
}

TORCH_LIBRARY_IMPL(smd, CompositeExplicitAutograd, m) { m.impl("shares_memory", boxed<&shares_memory>()); }

}  // namespace smd::torch_ext
