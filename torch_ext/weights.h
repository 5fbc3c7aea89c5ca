// Gradients of weights, apart from the rest of a backward.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <memory>
#include <vector>

namespace smd::torch_ext {

// The gradients of the weights of linear layers and convolutions before some tensors: nobody waits for them before the
// optimizer, and each is a product of what a layer was called with and of the gradient that arrives at it. A hook at
// the layer's node notes the two, and the product is computed here, at once or later, straight into `.grad`.
//
// - WGT-1: whoever runs the backward names what `begin` returns as its inputs. The weights here are not among them, so
//   autograd leaves their products out.
// - WGT-2: a layer is taken only if such a backward comes by its node for something else, and its weight only if
//   nothing that is left to autograd leads to it: else it would be counted twice, or not at all.
// - WGT-3: a weight with hooks on its gradient, or on the way to it, keeps PyTorch's way, since a hook is to see each
// gradient.
// - WGT-4: a product of narrow numbers, whose weight autocast has cast, is added to a wide `.grad` without being
//   rounded to the narrow type in between, where a device can do that.
// - WGT-5: what a product that is put off takes stays as it is. Autograd gives a leaf its first gradient as it is, and
//   adds the next ones to it in place: a leaf that got memory which a product takes gets a copy. An input that the
//   script changes is an error.
class WeightGradients : public torch::CustomClassHolder {
 public:
  // What autograd has of `roots` is looked through, and prepared for one backward from some of them. Others wait for
  // the gradients of `inputs`, which may serve as weights.
  WeightGradients(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& inputs);

  // How many layers it has. Without any, backward is as ever.
  int64_t size() const { return size_; }
  // A backward is about to run: returns the leaves that it is to find gradients of. Products are computed during it, or
  // (`later`) by `run`.
  std::vector<at::Tensor> begin(bool later);
  // It has run, and products are put off (WGT-5).
  void end();
  // Computes what has been put off, in the order in which it arrived.
  void run();

  struct Pending;

 private:
  std::shared_ptr<Pending> pending_;
  std::vector<at::Tensor> leaves_;
  // Of these, the ones that had no gradient when the backward began.
  std::vector<at::Tensor> fresh_;
  int64_t size_ = 0;
};

}  // namespace smd::torch_ext
