// Computes gradients of weights separately from the rest of a backward.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <memory>
#include <string>
#include <vector>

namespace smd::torch_ext {

// The gradients of the weights of layers: linear ones, also for batches of matrices and groups of rows, convolutions
// and embeddings. Nothing needs them before the optimizer does, and each is a function of the layer's input and the
// gradient of its output. A hook at the layer's autograd node notes both. The product is computed here, at once or
// later, directly into `.grad`, or into the part of it that the layer uses (weight_view.h).
//
// - WGT-1: the caller of backward passes the result of `begin` as its inputs. The weights are not among them, so
//   autograd does not compute their gradients.
// - WGT-2: that is so if such a backward reaches the layer's node for another leaf, and if no other path leads to the
//   weight. Otherwise its gradient would be counted twice, or not at all. If the weight's gradient is all that the node
//   computes, as in an embedding, the weight is an input, and the hook passes no gradient on.
// - WGT-3: a weight with hooks on its gradient, on the path to it, or on what the layer's node returns, is left to
//   autograd, because a hook must see each gradient.
// - WGT-4: where autocast has cast the weight, the product of the narrow tensors is added to a wide `.grad` without
//   being rounded to the narrow type in between, if the device supports that.
// - WGT-5: the inputs of a deferred product must not change. Autograd uses a leaf's first gradient as it is and adds
//   later ones in place, so a leaf whose gradient is the input of a product gets a copy. If the script changes an
//   input, an error is raised.
class WeightGradients : public torch::CustomClassHolder {
 public:
  // Searches the autograd graph of `roots` and prepares it for one backward from some of them. `inputs` are other
  // leaves whose gradients are needed; they may be used as weights.
  WeightGradients(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& inputs);

  // The number of layers. If it is 0, backward is unchanged.
  int64_t size() const { return size_; }
  // The autograd node that prevents the split; or, if most elements of matrices get their gradients within the
  // backward, the node of the largest one and its shape; otherwise empty.
  const std::string& unsplit_node() const { return unsplit_node_; }
  // Prepares a backward; returns the leaves to pass as its inputs. Products are computed during the backward, or by
  // `run` if `later`.
  std::vector<at::Tensor> begin(bool later);
  // Ends a backward whose products are deferred (WGT-5).
  void end();
  // Computes the deferred products in the order in which their gradients arrived.
  void run();

  struct Pending;

 private:
  std::shared_ptr<Pending> pending_;
  std::vector<at::Tensor> leaves_;
  // The leaves in `leaves_` that had no gradient when the backward began.
  std::vector<at::Tensor> fresh_;
  int64_t size_ = 0;
  std::string unsplit_node_;
};

}  // namespace smd::torch_ext
