// Reduces gradients as autograd makes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lending.h"
#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// What joins the parameters of one model to a reducer of the core: hooks on their gradient accumulators, a callback at
// the end of backward, and gradients that are views of the reducer's memory.
//
// No Python runs here and nothing takes its lock, except that PyTorch may do so to free a tensor.
class Reducer : public torch::CustomClassHolder {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
  };

  // Collective among the members of `group`.
  static c10::intrusive_ptr<Reducer> make(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                          int64_t bucket_bytes, int64_t first_bucket_bytes, bool find_unused_parameters,
                                          int64_t accumulation_steps, int64_t group);

  Reducer(std::vector<Parameter> parameters, rust::Box<smd::Reducer> core);
  ~Reducer() override;

  // Whether backwards that begin from now on are reduced or accumulate locally.
  void set_sync(bool sync);
  bool sync() const;

  // Before a training forward: makes `buffers` those of rank 0, unless nothing has happened to them since the last
  // reduced backward, which did so.
  void sync_buffers(std::vector<at::Tensor> buffers);

  // After a forward: a backward from `outputs` is one of this model's. Throws if a parameter has lost its hook.
  void watch(const std::vector<at::Tensor>& outputs);

  // Copies tensors of member `root` to all members.
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t root);

  std::string describe_plan() const;

 private:
  struct Hook;
  struct Entry;
  class Backward;

  struct Watched {
    Parameter parameter;
    // Keeps the accumulator, to which the hook belongs, alive.
    std::shared_ptr<torch::autograd::Node> accumulator;
    std::uintptr_t hook;
    // Of the gradient, as the core knows it: a parameter may be given other data after construction.
    at::TensorOptions options;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  // A backward of this model is running on this thread: from the first node that is known to be of this model, to
  // the end of the graph task that it belongs to.
  void enter();
  void on_gradient(std::size_t index, const torch::autograd::variable_list& incoming);
  void finish();
  void leave(bool finished);

  // Puts the gradient of a parameter where the core can reduce it, and tells the core.
  // `incoming` is what autograd has just accumulated into it, undefined if nothing.
  void place(std::size_t index, at::Tensor& gradient, const at::Tensor& incoming);
  // The same for a parameter without a gradient: it counts as zero.
  void place_zeros(std::size_t index);
  void mark_ready(std::size_t index, const at::Tensor& gradient, bool used);
  at::Tensor view_of(std::size_t index, rust::Box<SlotLease> lease) const;

  std::vector<Watched> watched_;
  SharedReducer core_;

  // Guards what follows: a model's backward may use several threads.
  std::recursive_mutex mutex_;
  enum class Mode { Outside, Entered, Local, Reduced } mode_ = Mode::Outside;
  // Gradients that are not parameters' own tensors, and where their reduced values go.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back_;
  // What parameters without a gradient get if another rank has one.
  std::vector<std::pair<std::size_t, at::Tensor>> zeros_;
  std::vector<at::Tensor> buffers_;
  bool buffers_stale_ = false;
};

}  // namespace smd::torch_ext
