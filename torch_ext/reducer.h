// Reduces gradients while autograd computes them.
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

#include "compat.h"
#include "ddp/ballot.h"
#include "ddp/comm_hook.h"
#include "ddp/device_buckets.h"
#include "ddp/step_times.h"
#include "placing_allocator.h"
#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// Connects the parameters of one model with a reducer of the core: by hooks on their gradient accumulators, by a
// callback at the end of backward, and by gradients that are views of the reducer's memory.
//
// With the setting `rounds`, a reduction is not tied to one backward. The caller begins and ends a round and reports
// which gradients are ready; several backwards may run before and during it.
//
// No function runs Python or takes its lock, except for a communication hook written in Python (`comm_hook.h`) and
// where PyTorch frees a tensor that Python knows.
class Reducer : public torch::CustomClassHolder {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    bool sparse = false;
  };
  using Parameters = std::vector<Parameter>;
  // Fields of the core's `ReducerOptions`, and `comm_hook`: the hook that reduces buckets, or -1.
  using Settings = c10::Dict<std::string, int64_t>;

  // Creates a reducer for the global ranks `ranks`, or for all ranks if it is empty. Collective. `sparse` and `delayed`
  // are indices into `parameters`. `frozen` are parameters that are not reduced because they require no gradient.
  static c10::intrusive_ptr<Reducer> make(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                          const std::vector<int64_t>& sparse, const std::vector<int64_t>& delayed,
                                          std::vector<at::Tensor> frozen, std::vector<std::string> frozen_names,
                                          const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                                          const Settings& settings);

  // Helpers of `make`, also used where the core's reducer is created separately (`PendingReducer`).
  static Parameters named(std::vector<at::Tensor> tensors, std::vector<std::string> names);
  static std::vector<Param> describe_all(const Parameters& parameters, const std::vector<int64_t>& delayed);
  static ReducerOptions options(const std::vector<int64_t>& bucket_bytes, const Settings& settings,
                                const Parameters& parameters);
  static c10::intrusive_ptr<Reducer> over(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core,
                                          const Settings& settings);

  Reducer(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core, const Settings& settings);
  ~Reducer() override;

  // Changes the settings between backwards. Collective.
  void configure(const std::vector<int64_t>& bucket_bytes, const Settings& settings);
  // The communicator of the reducer's ranks, whose operations are ordered with backwards.
  int64_t group() const;
  // Waits until the communicator may be used for something else. Throws if a backward is under way.
  void await_step();

  // Broadcasts rank 0's `buffers` before a training forward, unless they have not changed since the last reduced
  // backward, which has done so. `sync` is as for `watch`.
  void sync_buffers(std::vector<at::Tensor> buffers, bool sync);

  // Called after a forward with its outputs. A backward from `outputs` belongs to this model: with `sync` it is
  // reduced, without it gradients accumulate locally. A backward from the outputs of several forwards is reduced if one
  // of them has `sync`. `started` is the start of the forward in nanoseconds of the monotonic clock. Throws if a
  // parameter has lost its hook, or requires a gradient that it did not require at construction.
  void watch(const std::vector<at::Tensor>& outputs, bool sync, int64_t started);

  // The next backward is reduced, whatever `sync` its forwards had.
  void expect_sync();
  // Removes the model's hooks. Later backwards are not reduced.
  void remove_hooks();

  // Takes part in one backward of the other ranks with zeros (join shadow).
  void shadow();
  // Multiplies the reduced gradients of the next backward by `factor`, if it is defined.
  void scale_next(std::optional<at::Tensor> factor);

  // Begins a round. `open_by_vote` does so in the process set of the reducer's ranks and lets them vote: if the ranks
  // do not all take part, the round is over and `cancel` follows. `name` is the vote's name, and `what` describes the
  // plan, which must be equal on all ranks.
  void open();
  c10::intrusive_ptr<Ballot> open_by_vote(int64_t process_set, const std::string& name, const std::string& what);
  // Sets for each parameter after how many more accumulations its gradient is complete; with 0, `ready` reports it.
  void expect(const std::vector<int64_t>& accumulations);
  // Reports that the gradients of these parameters are complete.
  void ready(const std::vector<int64_t>& indices);
  // The parameters of the round that are not ready yet.
  std::vector<int64_t> missing() const;
  // Ends a round: waits until all gradients are reduced. Parameters that are not ready count as zero. Errors of the
  // round are thrown here, and never by backward.
  void close();
  // Ends a round that is not reduced by plan. The gradients keep their values. On a device, the current stream then
  // waits for the streams that have computed them.
  void cancel();
  // Waits until the device has completed the reductions of earlier rounds, and throws what has ended them. Does nothing
  // if the session is over.
  void await_device();
  // Whether another round is possible: all parameters still require gradients and have the same type, shape and device,
  // and the session is the same.
  bool fits() const;

  // Broadcasts tensors from member `root`.
  void broadcast(const std::vector<at::Tensor>& tensors, int64_t root);

  std::string describe_plan() const;
  // The parameters of each bucket, as indices into the list given at construction.
  std::vector<std::vector<int64_t>> buckets() const;
  // The durations of the phases of a step, and the other entries of torch's logging data.
  c10::Dict<std::string, int64_t> statistics();
  // The parameters in the order in which the last step's gradients arrived.
  std::vector<int64_t> last_order() const;
  void set_sample_rate(int64_t rate);

 private:
  struct Hook;
  struct Entry;
  class Backward;

  // A bucket that a communication hook reduces.
  struct HookedBucket {
    c10::intrusive_ptr<GradBucket> bucket;
    // The tensor that the hook gets, and the memory where the values belong. They are the same memory, unless the hook
    // resizes its tensor.
    at::Tensor buffer;
    at::Tensor home;
    // Gradients that are not in their slots, each with its place in the buffer.
    std::vector<std::pair<at::Tensor, at::Tensor>> elsewhere;
  };

  struct WatchedParameter {
    Parameter parameter;
    // Keeps the gradient accumulator alive, which owns the hook; null without hooks.
    compat::NodePtr accumulator;
    std::uintptr_t hook;
    // The gradient's properties as the core knows them. The script may assign other data to the parameter after
    // construction.
    at::TensorOptions options;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };

  void add_hook(std::size_t index);

  // Marks that a backward of this model runs on this thread: from the first autograd node that belongs to the model to
  // the end of its graph task.
  void enter(bool sync);
  void begin();
  void on_gradient(std::size_t index, const torch::autograd::variable_list& incoming);
  // As `enter`, for a gradient that autograd has accumulated in or before a round.
  void on_accumulated(std::size_t index, const torch::autograd::variable_list& incoming);
  // Makes the current stream wait for the gradients of the round on a device.
  void follow_gradients();
  // Lets the allocator place gradients until the backward on this thread ends.
  void place_in_backward();
  void start_round();
  // Places the gradients of these parameters in the round. An error ends the round.
  void place_gradients(const std::vector<std::size_t>& indices, const at::Tensor& incoming);
  static void make_dense(at::Tensor& gradient);
  void finish();
  void leave(bool finished);

  // Marks parameters without a gradient ready: with their earlier gradient, or with zeros.
  void place_missing();
  void run_comm_hooks();
  // Packs and reduces full buckets on a device; their gradients become views of the buckets.
  void reduce_on_device();
  void take_hooked();
  void average_sparse_gradients(const rust::Vec<std::uint8_t>& used);
  void complete();

  // Throws if a gradient's type, shape or device differs from what the core knows.
  static void check(const WatchedParameter& watched, const at::Tensor& gradient);
  // Puts a parameter's gradient where the core can reduce it, and marks it ready. `incoming` is the tensor that
  // autograd has just accumulated, undefined if there is none. `used` is as for `mark_ready`.
  void place(std::size_t index, at::Tensor& gradient, const at::Tensor& incoming, bool used);
  // The same for a gradient that this backward has not changed. It keeps its values if no rank has changed it.
  void place_copy(std::size_t index, const at::Tensor& gradient);
  // The same for a parameter without a gradient, which counts as zero.
  void place_zeros(std::size_t index);
  void mark_ready(std::size_t index, const at::Tensor& gradient, bool used);
  at::Tensor view_of(std::size_t index, rust::Box<SlotLease> lease) const;

  std::vector<WatchedParameter> watched_;
  Parameters frozen_;
  SharedReducer core_;
  int64_t comm_hook_ = -1;
  bool static_graph_ = false;
  // Whether each backward may leave out other parameters.
  bool may_leave_unused_ = false;
  bool has_sparse_ = false;
  bool has_rounds_ = false;

  // Guards the members below, because a backward may use several threads.
  std::recursive_mutex mutex_;
  enum class Mode { Outside, Entered, Local, Reduced, Shadowed } mode_ = Mode::Outside;
  // Whether the entered backward is reduced. Before that: the `sync` of the last forward, for a backward that does not
  // start at an output.
  bool wants_sync_ = true;
  bool sync_ = true;
  bool must_sync_ = false;
  // Whether the entered backward accumulates gradients, unlike `torch.autograd.grad`.
  bool accumulates_ = false;
  bool has_hooks_ = true;
  // In a round: for each parameter, the accumulations that are still to come, and the gradients in host memory that are
  // ready, which the script may release.
  std::vector<int64_t> expected_;
  // The error that has ended the round; `close` throws it.
  std::exception_ptr failure_;
  std::vector<at::Tensor> held_;
  bool places_ = false;
  StepTimes times_;
  // Gradients that were reduced in another tensor's memory, and the tensors that get their values.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back_;
  // Gradients of parameters that this backward did not reach; used if another rank's backward reached them.
  std::vector<std::pair<std::size_t, at::Tensor>> unused_gradients_;
  std::vector<at::Tensor> buffers_;
  bool buffers_stale_ = false;
  std::optional<at::Tensor> scale_;
  // Set for gradients on a CUDA device.
  std::unique_ptr<DeviceBuckets> device_buckets_;
  std::vector<std::optional<DeviceBuckets::Gradient>> device_gradients_;
  // In a round on a device: the streams that have computed or packed its gradients.
  std::vector<c10::Stream> gradient_streams_;
  std::vector<std::size_t> to_reduce_;
  // With a communication hook: the gradients of this backward, the buckets that are ready for the hook, and those that
  // it is reducing.
  std::vector<at::Tensor> gradients_;
  std::vector<std::size_t> to_hook_;
  std::vector<HookedBucket> hooked_;
};

}  // namespace smd::torch_ext
