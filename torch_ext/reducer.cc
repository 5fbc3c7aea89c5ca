#include "reducer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "adapter.h"
#include "completion.h"
#include "operations.h"
#include "sparse.h"
#include "status.h"

namespace smd::torch_ext {

using torch::autograd::variable_list;

namespace {

// Tensors of at least this many bytes are broadcast where they lie; smaller ones are packed.
constexpr std::size_t kPackBytes = 1 << 20;

bool is_packed(const at::Tensor& tensor) {
  return tensor.nbytes() < kPackBytes || !tensor.is_non_overlapping_and_dense();
}

// The same memory for a tensor that may be resized, which some hooks do; it then gets memory of its own.
at::Tensor resizable_view(const at::Tensor& tensor) {
  const auto keep = [](void* kept) { delete static_cast<at::Tensor*>(kept); };
  c10::DataPtr data(tensor.data_ptr(), new at::Tensor(tensor), keep, tensor.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(), std::move(data),
                       c10::GetAllocator(tensor.device().type()), /*resizable=*/true);
  return at::empty({0}, tensor.options()).set_(std::move(storage), 0, tensor.sizes(), tensor.strides());
}

ReducerOptions options_from(const std::vector<int64_t>& bucket_bytes, const Reducer::Settings& settings) {
  ReducerOptions options;
  for (const auto bytes : bucket_bytes) options.bucket_bytes.push_back(static_cast<std::size_t>(bytes));
  options.find_unused_parameters = settings.at("find_unused_parameters") != 0;
  options.accumulation_steps = static_cast<std::uint32_t>(settings.at("accumulation_steps"));
  options.static_graph = settings.at("static_graph") != 0;
  options.reduction =
      settings.at("comm_hook") >= 0 ? Reduction::ByCaller : static_cast<Reduction>(settings.at("reduction"));
  return options;
}

}  // namespace

// Runs after a parameter's gradient was accumulated.
struct Reducer::Hook final : torch::autograd::FunctionPostHook {
  Hook(const c10::intrusive_ptr<Reducer>& reducer, std::size_t index) : reducer_(reducer), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& incoming) override {
    if (auto reducer = reducer_.lock()) reducer->on_gradient(index_, incoming);
    return outputs;
  }

 private:
  c10::weak_intrusive_ptr<Reducer> reducer_;
  std::size_t index_;
};

// Runs before the node of an output.
struct Reducer::Entry final : torch::autograd::FunctionPreHook {
  Entry(const c10::intrusive_ptr<Reducer>& reducer, bool sync) : reducer_(reducer), sync_(sync) {}

  variable_list operator()(const variable_list& gradients) override {
    if (auto reducer = reducer_.lock()) {
      const std::lock_guard lock(reducer->mutex_);
      reducer->enter(sync_);
    }
    return gradients;
  }

 private:
  c10::weak_intrusive_ptr<Reducer> reducer_;
  bool sync_;
};

// Belongs to the callback at the end of a backward. Autograd drops callbacks of a backward that fails without calling
// them, which is how this one learns of it.
class Reducer::Backward {
 public:
  explicit Backward(c10::intrusive_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() {
    if (!finished_) reducer_->leave(false);
  }

  // Leaves at once: on a device's thread this object may outlive the call of `backward`, into the next step.
  void finish() {
    reducer_->finish();
    finished_ = true;
    reducer_->leave(true);
  }

 private:
  c10::intrusive_ptr<Reducer> reducer_;
  bool finished_ = false;
};

// A bucket that the hook works on.
struct Reducer::Hooked {
  c10::intrusive_ptr<GradBucket> bucket;
  // What the hook gets, and where its values belong: the same memory, unless the hook gives its tensor another one.
  at::Tensor buffer;
  at::Tensor home;
  // Gradients that are not in their slots, and their places in the buffer.
  std::vector<std::pair<at::Tensor, at::Tensor>> elsewhere;
};

c10::intrusive_ptr<Reducer> Reducer::make(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                          const std::vector<int64_t>& sparse, const std::vector<int64_t>& delayed,
                                          std::vector<at::Tensor> frozen, std::vector<std::string> frozen_names,
                                          const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                                          const Settings& settings) {
  TORCH_CHECK_VALUE(parameters.size() == names.size() && frozen.size() == frozen_names.size(),
                    "every parameter needs a name");
  Parameters named;
  Parameters named_frozen;
  for (std::size_t i = 0; i < frozen.size(); ++i) named_frozen.push_back({frozen[i], std::move(frozen_names[i])});
  std::vector<Param> described;
  const auto holds = [](const std::vector<int64_t>& places, std::size_t place) {
    return std::find(places.begin(), places.end(), static_cast<int64_t>(place)) != places.end();
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& tensor = parameters[i];
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "parameter `", names[i], "` is not dense but of layout ",
                     tensor.layout());
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu() || tensor.device().is_cuda(), "parameter `", names[i],
                                "` is on ", tensor.device(), ": expected the CPU or a CUDA device");
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.device() == parameters[0].device(), "parameter `", names[i], "` is on ",
                                tensor.device(), " and `", named[0].name, "` on ", parameters[0].device(),
                                ": expected all of them on one device");
    Param param;
    param.name = names[i];
    for (const auto size : tensor.sizes()) param.shape.push_back(static_cast<std::uint64_t>(size));
    param.dtype = describe(at::empty({0}, tensor.options())).dtype;
    param.sparse = holds(sparse, i);
    param.delayed = holds(delayed, i);
    named.push_back({tensor, std::move(names[i]), param.sparse});
    described.push_back(std::move(param));
  }
  const std::vector<std::size_t> members(ranks.begin(), ranks.end());
  auto options = options_from(bucket_bytes, settings);
  options.on_device = !named.empty() && named[0].tensor.is_cuda();
  auto core = checked(
      [&] { return new_reducer({members.data(), members.size()}, {described.data(), described.size()}, options); });
  auto reducer = c10::make_intrusive<Reducer>(std::move(named), std::move(named_frozen), std::move(core), settings);
  for (std::size_t i = 0; i < reducer->watched_.size(); ++i) {
    auto& watched = reducer->watched_[i];
    watched.hook = watched.accumulator->add_post_hook(std::make_unique<Hook>(reducer, i));
  }
  return reducer;
}

Reducer::Reducer(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core, const Settings& settings)
    : frozen_(std::move(frozen)),
      core_(std::make_shared<rust::Box<smd::Reducer>>(std::move(core))),
      comm_hook_(settings.at("comm_hook")),
      static_graph_(settings.at("static_graph") != 0),
      may_leave_unused_(settings.at("find_unused_parameters") != 0 && !static_graph_) {
  for (auto& parameter : parameters) {
    has_sparse_ |= parameter.sparse;
    Watched watched;
    watched.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    watched.hook = 0;
    watched.options = parameter.tensor.options().requires_grad(false);
    watched.sizes = parameter.tensor.sizes().vec();
    // Autograd's own rule for the layout of gradients.
    watched.strides = parameter.tensor.is_non_overlapping_and_dense()
                          ? parameter.tensor.strides().vec()
                          : c10::IntArrayRef(c10::contiguous_strides(parameter.tensor.sizes())).vec();
    watched.parameter = std::move(parameter);
    watched_.push_back(std::move(watched));
  }
  if (watched_.empty() || !watched_[0].options.device().is_cuda()) return;
  std::vector<GradientLayout> layouts;
  for (const auto& watched : watched_) layouts.push_back({watched.options, watched.sizes, watched.strides});
  device_buckets_ = std::make_unique<DeviceBuckets>(core_, watched_[0].options.device(), std::move(layouts));
}

Reducer::~Reducer() { remove_hooks(); }

void Reducer::remove_hooks() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(has_hooks_, false)) return;
  for (const auto& watched : watched_) watched.accumulator->del_post_hook(watched.hook);
}

void Reducer::configure(const std::vector<int64_t>& bucket_bytes, const Settings& settings) {
  const std::lock_guard lock(mutex_);
  auto options = options_from(bucket_bytes, settings);
  options.on_device = device_buckets_ != nullptr;
  checked([&] { (*core_)->configure(options); });
  comm_hook_ = settings.at("comm_hook");
  static_graph_ = settings.at("static_graph") != 0;
  may_leave_unused_ = settings.at("find_unused_parameters") != 0 && !static_graph_;
}

void Reducer::await_step() {
  checked([&] { (*core_)->await_step(); });
}

int64_t Reducer::group() const { return static_cast<int64_t>((*core_)->group()); }

std::string Reducer::describe_plan() const { return std::string((*core_)->describe_plan()); }

std::vector<std::vector<int64_t>> Reducer::buckets() const {
  std::vector<std::vector<int64_t>> buckets;
  for (std::size_t index = 0, end = watched_.empty() ? 0 : 1; index < end; ++index) {
    const auto bucket = (*core_)->bucket(index);
    buckets.emplace_back(bucket.params.begin(), bucket.params.end());
    end = bucket.num_buckets;
  }
  return buckets;
}

c10::Dict<std::string, int64_t> Reducer::statistics() {
  const std::lock_guard lock(mutex_);
  const auto record = (*core_)->record();
  auto statistics = times_.sampled();
  statistics.insert("has_rebuilt_buckets", static_cast<int64_t>(record.rebuilt));
  statistics.insert("unused_parameter_size", static_cast<int64_t>(record.unused_bytes));
  return statistics;
}

std::vector<int64_t> Reducer::last_order() const {
  const auto order = (*core_)->record().order;
  return {order.begin(), order.end()};
}

void Reducer::set_sample_rate(int64_t rate) {
  const std::lock_guard lock(mutex_);
  times_.set_sample_rate(rate);
}

void Reducer::expect_sync() {
  const std::lock_guard lock(mutex_);
  must_sync_ = true;
}

void Reducer::sync_buffers(std::vector<at::Tensor> buffers, bool sync) {
  const std::lock_guard lock(mutex_);
  if (sync) {
    if (buffers_stale_) broadcast(buffers, 0);
    buffers_ = std::move(buffers);
  }
  buffers_stale_ = true;
}

void Reducer::watch(const std::vector<at::Tensor>& outputs, bool sync, int64_t started) {
  if (!has_hooks_) return;
  sync_ = sync;
  if (sync) times_.forward_started(started);
  for (const auto& watched : watched_) {
    // Data of another type or device gets another accumulator, which has no hook.
    TORCH_CHECK(torch::autograd::impl::try_get_grad_accumulator(watched.parameter.tensor) == watched.accumulator,
                "parameter `", watched.parameter.name, "` was moved to another type or device (it is a ",
                watched.parameter.tensor.scalar_type(), " tensor on ", watched.parameter.tensor.device(),
                ") after DistributedDataParallel wrapped it: wrap the model afterwards");
  }
  for (const auto& frozen : frozen_) {
    TORCH_CHECK(!frozen.tensor.requires_grad(), "parameter `", frozen.name,
                "` was frozen when DistributedDataParallel wrapped it and requires a gradient now, which would not be "
                "reduced: wrap the model again, or freeze the parameter after wrapping and pass "
                "`find_unused_parameters=True`");
  }
  const auto self = c10::intrusive_ptr<Reducer>::reclaim_copy(this);
  for (const auto& output : outputs) {
    if (const auto& node = output.grad_fn()) node->add_pre_hook(std::make_unique<Entry>(self, sync));
  }
}

void Reducer::broadcast(const std::vector<at::Tensor>& tensors, int64_t root) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  checked([&] { (*core_)->await_step(); });
  const auto send = [&](const at::Tensor& dense) { checked([&] { run(broadcast_(dense, root, group())); }); };
  // On devices, all of them are one operation.
  std::vector<TensorOperation> on_device;
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda()) on_device.push_back(broadcast_(tensor, root, group()));
  }
  if (!on_device.empty()) checked([&] { queue(on_device); });
  for (const auto& operation : on_device) operation.finish();
  std::size_t packed_bytes = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.is_cuda() && is_packed(tensor)) packed_bytes += tensor.nbytes();
  }
  auto packed = at::empty({static_cast<int64_t>(packed_bytes)}, at::kByte);
  auto* next = packed.data_ptr<std::uint8_t>();
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda() || !is_packed(tensor)) continue;
    const auto dense = tensor.contiguous();
    if (dense.nbytes() > 0) std::memcpy(next, dense.const_data_ptr(), dense.nbytes());
    next += dense.nbytes();
  }
  if (packed_bytes > 0) send(packed);
  next = packed.data_ptr<std::uint8_t>();
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda()) continue;
    if (!is_packed(tensor)) {
      // Dense memory in whatever order, which is the same on all ranks: seen as a row.
      send(tensor.as_strided({tensor.numel()}, {1}));
    } else {
      tensor.copy_(at::from_blob(next, tensor.sizes(), tensor.options().requires_grad(false)));
      next += tensor.nbytes();
    }
  }
}

void Reducer::enter(bool sync) {
  if (mode_ != Mode::Outside) {
    wants_sync_ |= sync;
    return;
  }
  wants_sync_ = sync;
  // What is to be executed is listed only if not everything is.
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  accumulates_ = executed != nullptr && executed->empty();
  times_.backward_started();
  auto backward = std::make_shared<Backward>(c10::intrusive_ptr<Reducer>::reclaim_copy(this));
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  mode_ = Mode::Entered;
  if (!device_buckets_) lend_on_this_thread(core_);
}

void Reducer::begin() {
  mode_ = checked([&] { return (*core_)->begin(wants_sync_ || must_sync_); }) ? Mode::Reduced : Mode::Local;
  if (comm_hook_ >= 0) gradients_.resize(watched_.size());
  if (device_buckets_) device_gradients_.assign(watched_.size(), std::nullopt);
}

void Reducer::on_gradient(std::size_t index, const variable_list& incoming) {
  const std::lock_guard lock(mutex_);
  if (mode_ == Mode::Outside) enter(sync_);
  if (mode_ == Mode::Entered) {
    begin();
  }
  if (mode_ == Mode::Local) {
    (*core_)->note_local(index);
    return;
  }
  times_.gradient_made();
  if (static_graph_ && !checked([&] { return (*core_)->accumulated(index); })) return;
  {
    const at::NoGradGuard no_grad;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto& parameter = watched_[index].parameter;
    auto& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined()) {
      place(index, gradient, incoming[0]);
    } else {
      // A function may say that its gradient is zero by giving none.
      TORCH_CHECK(!incoming[0].defined(), "the gradient of `", parameter.name,
                  "` was taken away before it was reduced, by a hook of the parameter that sets `.grad` to None");
      place_zeros(index);
    }
    reduce_on_device();
  }
  run_comm_hooks();
}

void Reducer::check(const Watched& watched, const at::Tensor& gradient) {
  const auto& [parameter, accumulator, hook, options, sizes, strides] = watched;
  TORCH_CHECK_TYPE(gradient.layout() == at::kStrided, "the gradient of `", parameter.name, "` has layout ",
                   gradient.layout(),
                   ", but the parameter was taken for one with dense gradients: only `torch.nn.Embedding` and "
                   "`torch.nn.EmbeddingBag` with `sparse=True` are known to make others");
  TORCH_CHECK_TYPE(gradient.dtype() == options.dtype() && gradient.device() == options.device() &&
                       gradient.sizes() == at::IntArrayRef(sizes),
                   "the gradient of `", parameter.name, "` is a ", gradient.scalar_type(), " tensor of shape ",
                   gradient.sizes(), " on ", gradient.device(), ", but the parameter was a ",
                   c10::typeMetaToScalarType(options.dtype()), " tensor of shape ", at::IntArrayRef(sizes), " on ",
                   options.device(), " when it was wrapped");
}

void Reducer::place(std::size_t index, at::Tensor& gradient, const at::Tensor& incoming) {
  const auto& [parameter, accumulator, hook, options, sizes, strides] = watched_[index];
  if (parameter.sparse) return mark_ready(index, at::Tensor(), incoming.defined());
  check(watched_[index], gradient);
  if (gradient.requires_grad()) {
    TORCH_WARN_ONCE("the gradient of `", parameter.name,
                    "` has a graph of its own (`backward(create_graph=True)`): its values become the average over the "
                    "ranks, but its graph stays that of this rank");
    auto dense = at::empty_strided(sizes, strides, options);
    dense.copy_(gradient);
    copy_back_.emplace_back(gradient, dense);
    return mark_ready(index, dense, incoming.defined());
  }
  // Strides of dimensions of size 1 mean nothing, and an empty tensor has no layout at all.
  const auto fits = [&] {
    for (int64_t d = 0; d < gradient.dim(); ++d) {
      if (gradient.size(d) > 1 && gradient.stride(d) != strides[static_cast<std::size_t>(d)]) return false;
    }
    return true;
  }();
  // One that autograd has just stolen shares its memory with `incoming`, which the engine still holds.
  const bool stolen =
      incoming.defined() && incoming.has_storage() && incoming.storage().is_alias_of(gradient.storage());
  if (device_buckets_) {
    if (fits) {
      mark_ready(index, gradient, incoming.defined());
      if (auto& kept = device_gradients_[index]) kept->shared = gradient.storage().use_count() > (stolen ? 2 : 1);
      return;
    }
    auto dense = at::empty_strided(sizes, strides, options);
    dense.copy_(gradient);
    // With a hook, what it makes of the gradient is copied back.
    if (comm_hook_ >= 0) copy_back_.emplace_back(gradient, dense);
    return mark_ready(index, dense, incoming.defined());
  }
  const auto* made = static_cast<const std::uint8_t*>(gradient.const_data_ptr());
  if (fits && (*core_)->is_slot(index, made)) return mark_ready(index, gradient, incoming.defined());
  (*core_)->observe(index, made);

  // A gradient that nobody else can see may move into its slot.
  const bool ours = stolen || (gradient.use_count() == 1 && gradient.storage().use_count() == 1);
  if (ours) {
    auto lease = (*core_)->take_slot(index);
    if (lease->ptr() != nullptr) {
      if (fits) lease->fill(static_cast<const std::uint8_t*>(gradient.const_data_ptr()));
      auto view = view_of(index, std::move(lease));
      if (!fits) view.copy_(gradient);
      gradient = std::move(view);
      return mark_ready(index, gradient, incoming.defined());
    }
  }
  if (fits) return mark_ready(index, gradient, incoming.defined());
  auto dense = at::empty_strided(sizes, strides, options);
  dense.copy_(gradient);
  copy_back_.emplace_back(gradient, dense);
  mark_ready(index, dense, incoming.defined());
}

void Reducer::place_copy(std::size_t index, const at::Tensor& gradient) {
  const auto& watched = watched_[index];
  if (watched.parameter.sparse) return mark_ready(index, at::Tensor(), false);
  check(watched, gradient);
  auto copy = at::empty_strided(watched.sizes, watched.strides, watched.options);
  copy.copy_(gradient);
  stand_ins_.emplace_back(index, copy);
  mark_ready(index, copy, false);
}

void Reducer::place_zeros(std::size_t index) {
  const auto& watched = watched_[index];
  if (watched.parameter.sparse) return mark_ready(index, at::Tensor(), false);
  auto lease = (*core_)->take_slot(index);
  at::Tensor zeros;
  if (lease->ptr() != nullptr) {
    lease->zero();
    zeros = view_of(index, std::move(lease));
  } else {
    zeros = at::empty_strided(watched.sizes, watched.strides, watched.options).zero_();
  }
  stand_ins_.emplace_back(index, zeros);
  mark_ready(index, zeros, false);
}

void Reducer::mark_ready(std::size_t index, const at::Tensor& gradient, bool used) {
  auto* data = gradient.defined() ? static_cast<std::uint8_t*>(gradient.data_ptr()) : nullptr;
  const auto full = checked([&] { return (*core_)->mark_ready(index, data, used); });
  if (device_buckets_ && comm_hook_ < 0) {
    if (gradient.defined()) device_gradients_[index] = {gradient, current_stream(gradient.device())};
    for (auto bucket = full.begin; bucket < full.end; ++bucket) to_reduce_.push_back(bucket);
    return;
  }
  if (comm_hook_ < 0) return;
  gradients_[index] = gradient;
  for (auto bucket = full.begin; bucket < full.end; ++bucket) to_hook_.push_back(bucket);
}

at::Tensor Reducer::view_of(std::size_t index, rust::Box<SlotLease> lease) const {
  const auto& watched = watched_[index];
  void* data = lease->ptr();
  const auto give_back = [](void* raw) { rust::Box<SlotLease>::from_raw(static_cast<SlotLease*>(raw)); };
  return at::for_blob(data, watched.sizes)
      .strides(watched.strides)
      .context(lease.into_raw(), give_back)
      .options(watched.options)
      .make_tensor();
}

void Reducer::reduce_on_device() {
  for (const auto index : std::exchange(to_reduce_, {})) {
    const auto& plan = device_buckets_->reduce(index, device_gradients_);
    for (const auto param : plan.params) {
      auto& gradient = device_gradients_[param];
      if (!gradient) continue;
      const auto is_for = [&](const auto& stand_in) { return stand_in.first == param; };
      const auto stand_in = std::find_if(stand_ins_.begin(), stand_ins_.end(), is_for);
      if (stand_in != stand_ins_.end()) {
        stand_in->second = std::move(gradient->value);
      } else {
        watched_[param].parameter.tensor.mutable_grad() = std::move(gradient->value);
      }
      gradient.reset();
    }
  }
}

void Reducer::run_comm_hooks() {
  if (to_hook_.empty()) return;
  const auto arena = std::make_shared<rust::Box<Arena>>((*core_)->arena());
  for (const auto index : std::exchange(to_hook_, {})) {
    const auto plan = (*core_)->bucket(index);
    if (plan.elems == 0) {
      (*core_)->reduced_by_caller();
      continue;
    }
    Hooked hooked;
    const auto elems = static_cast<int64_t>(plan.elems);
    const auto& options = watched_[plan.params[0]].options;
    bool in_place = true;
    for (const auto param : plan.params) {
      const auto& gradient = gradients_[param];
      in_place &=
          !device_buckets_ && (!gradient.defined() || gradient.numel() == 0 ||
                               (*core_)->is_slot(param, static_cast<const std::uint8_t*>(gradient.const_data_ptr())));
    }
    if (in_place) {
      auto* data = (*arena)->at(plan.offset_bytes);
      hooked.home = at::from_blob(data, {elems}, [arena](void*) {}, options);
      hooked.buffer = resizable_view(hooked.home);
    } else {
      hooked.home = at::empty({elems}, options);
      hooked.buffer = resizable_view(hooked.home);
    }
    std::vector<GradBucket::Slot> slots;
    for (std::size_t i = 0; i < plan.params.size(); ++i) {
      const auto& watched = watched_[plan.params[i]];
      const auto start = static_cast<int64_t>(plan.starts[i]);
      if (!watched.parameter.sparse) slots.push_back({watched.parameter.tensor, start, watched.strides});
      if (in_place || watched.parameter.sparse) continue;
      const at::NoGradGuard no_grad;
      auto place = hooked.home.as_strided(watched.sizes, watched.strides, start);
      place.copy_(gradients_[plan.params[i]]);
      hooked.elsewhere.emplace_back(gradients_[plan.params[i]], std::move(place));
    }
    hooked.bucket = c10::make_intrusive<GradBucket>(static_cast<int64_t>(index), index + 1 == plan.num_buckets,
                                                    hooked.buffer, std::move(slots));
    start_comm_hook(comm_hook_, hooked.bucket);
    hooked_.push_back(std::move(hooked));
  }
}

void Reducer::take_hooked() {
  // Python runs before the guards.
  std::vector<at::Tensor> results;
  for (const auto& hooked : hooked_) results.push_back(await_comm_hook(comm_hook_, hooked.bucket->index()));
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto next = results.begin();
  for (auto& [bucket, buffer, home, elsewhere] : hooked_) {
    const auto& result = *next++;
    TORCH_CHECK_VALUE(result.numel() == home.numel(), "the communication hook made ", result.numel(),
                      " elements of bucket ", bucket->index(), ", which has ", home.numel());
    if (result.const_data_ptr() != home.const_data_ptr()) home.copy_(result.view({-1}));
    for (auto& [gradient, place] : elsewhere) gradient.copy_(place);
    (*core_)->reduced_by_caller();
  }
}

void Reducer::place_missing() {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto missing = (*core_)->missing();
  if (missing.empty()) return;
  std::vector<std::size_t> frozen;
  for (const auto index : missing) {
    if (!watched_[index].parameter.tensor.requires_grad()) frozen.push_back(index);
  }
  for (const auto index : checked([&] { return (*core_)->stand_ins({frozen.data(), frozen.size()}); })) {
    auto& gradient = watched_[index].parameter.tensor.mutable_grad();
    if (!gradient.defined()) {
      place_zeros(index);
    } else if (may_leave_unused_) {
      place_copy(index, gradient);
    } else {
      place(index, gradient, at::Tensor());
    }
  }
  reduce_on_device();
}

void Reducer::average_sparse_gradients(const rust::Vec<std::uint8_t>& used) {
  if (!has_sparse_) return;
  std::vector<std::size_t> indices;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> like;
  for (std::size_t index = 0; index < watched_.size(); ++index) {
    const auto& tensor = watched_[index].parameter.tensor;
    if (!watched_[index].parameter.sparse || (!used.empty() && used[index] == 0)) continue;
    indices.push_back(index);
    gradients.push_back(mode_ == Mode::Shadowed ? at::Tensor() : tensor.grad());
    like.push_back(tensor);
  }
  const auto averages = average_sparse(gradients, like, group());
  if (mode_ == Mode::Shadowed) return;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    watched_[indices[i]].parameter.tensor.mutable_grad() = averages[i];
  }
}

void Reducer::finish() {
  const std::lock_guard lock(mutex_);
  if (mode_ == Mode::Entered && accumulates_ && has_hooks_) {
    // This rank's loss depends on no parameter, but other ranks' may: they get zeros, or an error. If all parameters
    // are frozen, as a critic's are while its generator learns, they are so everywhere.
    const auto requires_gradient = [](const Watched& watched) { return watched.parameter.tensor.requires_grad(); };
    if (std::any_of(watched_.begin(), watched_.end(), requires_gradient)) begin();
  }
  // Nothing was accumulated (`torch.autograd.grad`), or nothing is to be reduced.
  if (mode_ != Mode::Reduced) return;
  lend_on_this_thread(nullptr);
  place_missing();
  complete();
}

void Reducer::complete() {
  run_comm_hooks();
  take_hooked();
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto used = checked([&] { return (*core_)->finish(); });
  if (device_buckets_) device_buckets_->follow();
  average_sparse_gradients(used);
  if (mode_ == Mode::Reduced) {
    const auto record = times_.is_sampled() ? (*core_)->record() : StepRecord();
    times_.reduced(static_cast<int64_t>(record.communication_start), static_cast<int64_t>(record.communication_end));
    for (auto& [gradient, dense] : copy_back_) gradient.copy_(dense);
    // What no rank used keeps what it has: no gradient, so that optimizers pass it over, or an earlier one.
    const auto is_used = [&](std::size_t index) { return used.empty() || used[index] != 0; };
    for (auto& [index, value] : stand_ins_) {
      if (!is_used(index)) continue;
      auto& gradient = watched_[index].parameter.tensor.mutable_grad();
      if (gradient.defined()) {
        gradient.copy_(value);
      } else {
        gradient = std::move(value);
      }
    }
    if (scale_) {
      for (std::size_t index = 0; index < watched_.size(); ++index) {
        auto& gradient = watched_[index].parameter.tensor.mutable_grad();
        if (gradient.defined() && is_used(index)) gradient.mul_(*scale_);
      }
    }
  }
  if (!buffers_.empty()) {
    broadcast(buffers_, 0);
    buffers_stale_ = false;
  }
}

void Reducer::shadow() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(mode_ == Mode::Outside, "a backward of this model is under way in this process");
  if (!checked([&] { return (*core_)->begin(true); })) return;
  mode_ = Mode::Shadowed;
  if (comm_hook_ >= 0) gradients_.resize(watched_.size());
  if (device_buckets_) device_gradients_.assign(watched_.size(), std::nullopt);
  const auto end = std::shared_ptr<bool>(new bool(false), [this](const bool* finished) {
    leave(*finished);
    delete finished;
  });
  {
    const at::NoGradGuard no_grad;
    for (std::size_t index = 0; index < watched_.size(); ++index) place_zeros(index);
    reduce_on_device();
  }
  complete();
  *end = true;
}

void Reducer::scale_next(std::optional<at::Tensor> factor) {
  const std::lock_guard lock(mutex_);
  scale_ = std::move(factor);
}

void Reducer::leave(bool finished) {
  const std::lock_guard lock(mutex_);
  if (!finished && (mode_ == Mode::Reduced || mode_ == Mode::Shadowed)) {
    (*core_)->abandon("its backward ended with an exception", !buffers_.empty() || has_sparse_);
  }
  lend_on_this_thread(nullptr);
  mode_ = Mode::Outside;
  must_sync_ = false;
  copy_back_.clear();
  stand_ins_.clear();
  to_hook_.clear();
  to_reduce_.clear();
  device_gradients_.clear();
  if (device_buckets_) device_buckets_->leave();
  hooked_.clear();
  gradients_.clear();
  // Not kept beyond the step: the model may get others.
  buffers_.clear();
}

TORCH_LIBRARY_FRAGMENT(smd, m) {
  m.class_<Reducer>("Reducer")
      .def(torch::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names,
                          const std::vector<int64_t>& sparse, const std::vector<int64_t>& delayed,
                          std::vector<at::Tensor> frozen, std::vector<std::string> frozen_names,
                          const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                          const Reducer::Settings& settings) {
        return Reducer::make(std::move(parameters), std::move(names), sparse, delayed, std::move(frozen),
                             std::move(frozen_names), ranks, bucket_bytes, settings);
      }))
      .def("configure", &Reducer::configure)
      .def("group", &Reducer::group)
      .def("await_step", &Reducer::await_step)
      .def("sync_buffers", &Reducer::sync_buffers)
      .def("watch", &Reducer::watch)
      .def("expect_sync", &Reducer::expect_sync)
      .def("remove_hooks", &Reducer::remove_hooks)
      .def("shadow", &Reducer::shadow)
      .def("scale_next", &Reducer::scale_next)
      .def("broadcast", &Reducer::broadcast)
      .def("describe_plan", &Reducer::describe_plan)
      .def("buckets", &Reducer::buckets)
      .def("statistics", &Reducer::statistics)
      .def("last_order", &Reducer::last_order)
      .def("set_sample_rate", &Reducer::set_sample_rate);
}

}  // namespace smd::torch_ext
