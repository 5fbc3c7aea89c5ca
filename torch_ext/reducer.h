// Reduces gradients as autograd makes them.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ballot.h"
#include "comm_hook.h"
#include "compat.h"
#include "device_buckets.h"
#include "placing_allocator.h"
#include "smd/src/bridge.rs.h"
#include "step_times.h"

namespace smd::torch_ext {

// What joins the parameters of one model to a reducer of the core: hooks on their gradient accumulators, a callback at
// the end of backward, and gradients that are views of the reducer's memory.
//
// With the setting `rounds` a reduction is no backward but a round, which its caller begins and ends: gradients are
// ready when the caller says so, and any number of backwards may come before and in between.
//
// No Python runs and nothing takes its lock, except for a communication hook written in Python (`comm_hook.h`) and
// where PyTorch frees a tensor that Python knows.
class Reducer : public torch::CustomClassHolder {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    bool sparse = false;
  };
  using Parameters = std::vector<Parameter>;
  // Fields of the core's options, and `comm_hook`, which is -1 or the hook that reduces buckets.
  using Settings = c10::Dict<std::string, int64_t>;

  // Collective among the global ranks `ranks`, or all if it is empty. `sparse` and `delayed` are places in
  // `parameters`. `frozen` are parameters that are not reduced because they require no gradient.
  static c10::intrusive_ptr<Reducer> make(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                          const std::vector<int64_t>& sparse, const std::vector<int64_t>& delayed,
                                          std::vector<at::Tensor> frozen, std::vector<std::string> frozen_names,
                                          const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                                          const Settings& settings);

  // Its parts, for whoever has the core's part made elsewhere.
  static Parameters named(std::vector<at::Tensor> tensors, std::vector<std::string> names);
  static std::vector<Param> describe_all(const Parameters& parameters, const std::vector<int64_t>& delayed);
  static ReducerOptions options(const std::vector<int64_t>& bucket_bytes, const Settings& settings,
                                const Parameters& parameters);
  static c10::intrusive_ptr<Reducer> over(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core,
                                          const Settings& settings);

  Reducer(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core, const Settings& settings);
  ~Reducer() override;

  // Chooses settings anew, between backwards. Collective.
  void configure(const std::vector<int64_t>& bucket_bytes, const Settings& settings);
  // The communicator of these ranks that keeps its order with backwards.
  int64_t group() const;
  // Throws if a backward is under way.
  void await_step();

  // Before a training forward: makes `buffers` those of rank 0, unless nothing has happened to them since the last
  // reduced backward, which did so. `sync` is as for `watch`.
  void sync_buffers(std::vector<at::Tensor> buffers, bool sync);

  // After a forward: a backward from `outputs` is one of this model's, and is reduced or, without `sync`, accumulates
  // locally. A backward from the outputs of several forwards is reduced if any of them wants it. `started` is when the
  // forward began, in nanoseconds of the monotonic clock. Throws if a parameter has lost its hook, or requires a
  // gradient only now.
  void watch(const std::vector<at::Tensor>& outputs, bool sync, int64_t started);

  // The next backward is reduced, whatever its forwards said.
  void expect_sync();
  // Takes the model's hooks away: from now on its backwards are those of the module alone.
  void remove_hooks();

  // Takes part in a backward of the other ranks, with zeros.
  void shadow();
  // Reduced gradients of the next backward are multiplied by this, if it is defined.
  void scale_next(std::optional<at::Tensor> factor);

  // A round begins. With a vote, in the process set whose ranks these are, it may turn out that ranks do not all take
  // part; then the round is over, and `cancel` follows. `name` is the vote's, and `what` tells what is planned.
  void open();
  c10::intrusive_ptr<Ballot> open_by_vote(int64_t process_set, const std::string& name, const std::string& what);
  // In a hook of a parameter: its gradient is complete with what is being accumulated.
  void announce(int64_t index);
  // These parameters have gradients, which are complete.
  void ready(const std::vector<int64_t>& indices);
  // Parameters of the round that are not ready.
  std::vector<int64_t> missing() const;
  // Ends a round: waits until everything is reduced. Parameters that were not ready count as zero. What failed in the
  // round is thrown here, never by backward.
  void close();
  void cancel();
  // Whether rounds may go on: all parameters require gradients and are what they were, and so is the session.
  bool fits() const;

  // Copies tensors of member `root` to all members.
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t root);

  std::string describe_plan() const;
  // The parameters of each bucket, by their places at construction.
  std::vector<std::vector<int64_t>> buckets() const;
  // How long the parts of a step took, and what else torch's logging data has of it.
  c10::Dict<std::string, int64_t> statistics();
  // Parameters in the order in which the last step's gradients came.
  std::vector<int64_t> last_order() const;
  void set_sample_rate(int64_t rate);

 private:
  struct Hook;
  struct Entry;
  class Backward;

  // A bucket that the hook works on.
  struct Hooked {
    c10::intrusive_ptr<GradBucket> bucket;
    // What the hook gets, and where its values belong: the same memory, unless the hook gives its tensor another one.
    at::Tensor buffer;
    at::Tensor home;
    // Gradients that are not in their slots, and their places in the buffer.
    std::vector<std::pair<at::Tensor, at::Tensor>> elsewhere;
  };

  struct Watched {
    Parameter parameter;
    // Keeps the accumulator, to which the hook belongs, alive.
    compat::NodePtr accumulator;
    std::uintptr_t hook;
    // Of the gradient, as the core knows it: a parameter may be given other data after construction.
    at::TensorOptions options;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  void add_hook(std::size_t index);

  // A backward of this model is running on this thread: from the first node that is known to be of this model, to
  // the end of the graph task that it belongs to.
  void enter(bool sync);
  void begin();
  void on_gradient(std::size_t index, const torch::autograd::variable_list& incoming);
  // The same in the backward of a round, or before.
  void on_part(std::size_t index, const torch::autograd::variable_list& incoming);
  // Until the backward that runs on this thread ends.
  void place_in_backward();
  void start_round();
  // Places the gradients of these parameters in the round; what fails ends it.
  void place_part(const std::vector<std::size_t>& indices, const at::Tensor& incoming);
  static void make_dense(at::Tensor& gradient);
  void finish();
  void leave(bool finished);

  // Stand-ins for gradients that did not come.
  void place_missing();
  void run_comm_hooks();
  // Packs and reduces full buckets on a device; their gradients become views of the buckets.
  void reduce_on_device();
  void take_hooked();
  void average_sparse_gradients(const rust::Vec<std::uint8_t>& used);
  void complete();

  // Throws if a gradient is not what the core knows of it.
  static void check(const Watched& watched, const at::Tensor& gradient);
  // Puts the gradient of a parameter where the core can reduce it, and tells the core.
  // `incoming` is what autograd has just accumulated into it, undefined if nothing; `used` is as for `mark_ready`.
  void place(std::size_t index, at::Tensor& gradient, const at::Tensor& incoming, bool used);
  // The same for a gradient that this backward has not touched: it stays as it is if no rank's has.
  void place_copy(std::size_t index, const at::Tensor& gradient);
  // The same for a parameter without a gradient: it counts as zero.
  void place_zeros(std::size_t index);
  void mark_ready(std::size_t index, const at::Tensor& gradient, bool used);
  at::Tensor view_of(std::size_t index, rust::Box<SlotLease> lease) const;

  std::vector<Watched> watched_;
  Parameters frozen_;
  SharedReducer core_;
  int64_t comm_hook_ = -1;
  bool static_graph_ = false;
  // Whether a backward may pass parameters over, other ones each time.
  bool may_leave_unused_ = false;
  bool has_sparse_ = false;
  bool has_rounds_ = false;

  // Guards what follows: a model's backward may use several threads.
  std::recursive_mutex mutex_;
  enum class Mode { Outside, Entered, Local, Reduced, Shadowed } mode_ = Mode::Outside;
  // Whether the backward that was entered is to be reduced, and what the last forward says about one that was not
  // entered through an output.
  bool wants_sync_ = true;
  bool sync_ = true;
  bool must_sync_ = false;
  // Whether the backward that was entered is one that accumulates gradients, unlike `torch.autograd.grad`.
  bool accumulates_ = false;
  bool has_hooks_ = true;
  // Of a round: parameters whose gradients are complete with what is being accumulated, and the gradients that are
  // ready, which the script could let go of.
  std::vector<bool> announced_;
  // Why the round has ended before its caller does it.
  std::exception_ptr failure_;
  std::vector<at::Tensor> held_;
  bool places_ = false;
  StepTimes times_;
  // Gradients that are not parameters' own tensors, and where their reduced values go.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back_;
  // What parameters that this backward did not reach get if another rank's did.
  std::vector<std::pair<std::size_t, at::Tensor>> unused_gradients_;
  std::vector<at::Tensor> buffers_;
  bool buffers_stale_ = false;
  std::optional<at::Tensor> scale_;
  // For gradients on a CUDA device.
  std::unique_ptr<DeviceBuckets> device_buckets_;
  std::vector<std::optional<DeviceBuckets::Gradient>> device_gradients_;
  std::vector<std::size_t> to_reduce_;
  // With a communication hook: the gradients of this backward, the buckets that wait for the hook, and those that it
  // has.
  std::vector<at::Tensor> gradients_;
  std::vector<std::size_t> to_hook_;
  std::vector<Hooked> hooked_;
};

}  // namespace smd::torch_ext
