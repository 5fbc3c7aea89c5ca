#include "reducer.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <cstring>
#include <utility>

#include "adapter.h"
#include "status.h"

namespace smd::torch_ext {

using torch::autograd::variable_list;

namespace {

// Tensors of at least this many bytes are broadcast where they lie; smaller ones are packed.
constexpr std::size_t kPackBytes = 1 << 20;

bool is_packed(const at::Tensor& tensor) {
  return tensor.nbytes() < kPackBytes || !tensor.is_non_overlapping_and_dense();
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
  explicit Entry(const c10::intrusive_ptr<Reducer>& reducer) : reducer_(reducer) {}

  variable_list operator()(const variable_list& gradients) override {
    if (auto reducer = reducer_.lock()) {
      const std::lock_guard lock(reducer->mutex_);
      reducer->enter();
    }
    return gradients;
  }

 private:
  c10::weak_intrusive_ptr<Reducer> reducer_;
};

// Belongs to the callback at the end of a backward. Autograd drops callbacks of a backward that fails without calling
// them, which is how this one learns of it.
class Reducer::Backward {
 public:
  explicit Backward(c10::intrusive_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() { reducer_->leave(finished_); }

  void finish() {
    reducer_->finish();
    finished_ = true;
  }

 private:
  c10::intrusive_ptr<Reducer> reducer_;
  bool finished_ = false;
};

c10::intrusive_ptr<Reducer> Reducer::make(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                          int64_t bucket_bytes, int64_t first_bucket_bytes, bool find_unused_parameters,
                                          int64_t accumulation_steps, int64_t group) {
  TORCH_CHECK_VALUE(parameters.size() == names.size(), "every parameter needs a name");
  std::vector<Parameter> named;
  std::vector<Param> described;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& tensor = parameters[i];
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "parameter `", names[i], "` is not dense but of layout ",
                     tensor.layout());
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu(), "parameter `", names[i], "` is on ", tensor.device(),
                                ": only CPU parameters are supported so far");
    Param param;
    param.name = names[i];
    for (const auto size : tensor.sizes()) param.shape.push_back(static_cast<std::uint64_t>(size));
    param.dtype = describe(at::empty({0}, tensor.options())).dtype;
    described.push_back(std::move(param));
    named.push_back({tensor, std::move(names[i])});
  }
  ReducerOptions options;
  options.bucket_bytes = static_cast<std::size_t>(bucket_bytes);
  options.first_bucket_bytes = static_cast<std::size_t>(first_bucket_bytes);
  options.find_unused_parameters = find_unused_parameters;
  options.accumulation_steps = static_cast<std::uint32_t>(accumulation_steps);
  auto core = checked(
      [&] { return new_reducer(static_cast<std::uint64_t>(group), {described.data(), described.size()}, options); });
  auto reducer = c10::make_intrusive<Reducer>(std::move(named), std::move(core));
  for (std::size_t i = 0; i < reducer->watched_.size(); ++i) {
    auto& watched = reducer->watched_[i];
    watched.hook = watched.accumulator->add_post_hook(std::make_unique<Hook>(reducer, i));
  }
  return reducer;
}

Reducer::Reducer(std::vector<Parameter> parameters, rust::Box<smd::Reducer> core)
    : core_(std::make_shared<rust::Box<smd::Reducer>>(std::move(core))) {
  for (auto& parameter : parameters) {
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
}

Reducer::~Reducer() {
  for (const auto& watched : watched_) watched.accumulator->del_post_hook(watched.hook);
}

void Reducer::set_sync(bool sync) { (*core_)->set_sync(sync); }

bool Reducer::sync() const { return (*core_)->sync(); }

std::string Reducer::describe_plan() const { return std::string((*core_)->describe_plan()); }

void Reducer::sync_buffers(std::vector<at::Tensor> buffers) {
  const std::lock_guard lock(mutex_);
  if (sync()) {
    if (buffers_stale_) broadcast(buffers, 0);
    buffers_ = std::move(buffers);
  }
  buffers_stale_ = true;
}

void Reducer::watch(const std::vector<at::Tensor>& outputs) {
  for (const auto& watched : watched_) {
    // Data of another type or device gets another accumulator, which has no hook.
    TORCH_CHECK(torch::autograd::impl::try_get_grad_accumulator(watched.parameter.tensor) == watched.accumulator,
                "parameter `", watched.parameter.name, "` was moved to another type or device (it is a ",
                watched.parameter.tensor.scalar_type(), " tensor on ", watched.parameter.tensor.device(),
                ") after DistributedDataParallel wrapped it: wrap the model afterwards");
  }
  const auto self = c10::intrusive_ptr<Reducer>::reclaim_copy(this);
  for (const auto& output : outputs) {
    if (const auto& node = output.grad_fn()) node->add_pre_hook(std::make_unique<Entry>(self));
  }
}

void Reducer::broadcast(const std::vector<at::Tensor>& tensors, int64_t root) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto send = [&](const at::Tensor& dense) {
    auto view = describe(dense);
    checked([&] { (*core_)->broadcast(view, static_cast<std::size_t>(root)); });
  };
  std::size_t packed_bytes = 0;
  for (const auto& tensor : tensors) {
    if (is_packed(tensor)) packed_bytes += tensor.nbytes();
  }
  auto packed = at::empty({static_cast<int64_t>(packed_bytes)}, at::kByte);
  auto* next = packed.data_ptr<std::uint8_t>();
  for (const auto& tensor : tensors) {
    if (!is_packed(tensor)) continue;
    const auto dense = tensor.contiguous();
    if (dense.nbytes() > 0) std::memcpy(next, dense.const_data_ptr(), dense.nbytes());
    next += dense.nbytes();
  }
  if (packed_bytes > 0) send(packed);
  next = packed.data_ptr<std::uint8_t>();
  for (const auto& tensor : tensors) {
    if (!is_packed(tensor)) {
      // Dense memory in whatever order, which is the same on all ranks: seen as a row.
      send(tensor.as_strided({tensor.numel()}, {1}));
    } else {
      tensor.copy_(at::from_blob(next, tensor.sizes(), tensor.options().requires_grad(false)));
      next += tensor.nbytes();
    }
  }
}

void Reducer::enter() {
  if (mode_ != Mode::Outside) return;
  auto backward = std::make_shared<Backward>(c10::intrusive_ptr<Reducer>::reclaim_copy(this));
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  mode_ = Mode::Entered;
  lend_on_this_thread(core_);
}

void Reducer::on_gradient(std::size_t index, const variable_list& incoming) {
  const std::lock_guard lock(mutex_);
  enter();
  if (mode_ == Mode::Entered) {
    mode_ = checked([&] { return (*core_)->begin(); }) ? Mode::Reduced : Mode::Local;
  }
  if (mode_ == Mode::Local) {
    (*core_)->note_local(index);
    return;
  }
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto& parameter = watched_[index].parameter;
  auto& gradient = parameter.tensor.mutable_grad();
  if (gradient.defined()) return place(index, gradient, incoming[0]);
  // A function may say that its gradient is zero by giving none.
  TORCH_CHECK(!incoming[0].defined(), "the gradient of `", parameter.name,
              "` was taken away before it was reduced, by a hook of the parameter that sets `.grad` to None");
  place_zeros(index);
}

void Reducer::place(std::size_t index, at::Tensor& gradient, const at::Tensor& incoming) {
  const auto& [parameter, accumulator, hook, options, sizes, strides] = watched_[index];
  TORCH_CHECK_TYPE(gradient.layout() == at::kStrided, "the gradient of `", parameter.name, "` has layout ",
                   gradient.layout(), ": DistributedDataParallel reduces dense gradients (use `sparse=False`)");
  TORCH_CHECK_TYPE(gradient.dtype() == options.dtype() && gradient.device() == options.device() &&
                       gradient.sizes() == at::IntArrayRef(sizes),
                   "the gradient of `", parameter.name, "` is a ", gradient.scalar_type(), " tensor of shape ",
                   gradient.sizes(), " on ", gradient.device(), ", but the parameter was a ",
                   c10::typeMetaToScalarType(options.dtype()), " tensor of shape ", at::IntArrayRef(sizes), " on ",
                   options.device(), " when it was wrapped");
  TORCH_CHECK_NOT_IMPLEMENTED(!gradient.requires_grad(), "the gradient of `", parameter.name,
                              "` has a graph of its own: DistributedDataParallel does not support "
                              "`backward(create_graph=True)`");
  // Strides of dimensions of size 1 mean nothing, and an empty tensor has no layout at all.
  const auto fits = [&] {
    for (int64_t d = 0; d < gradient.dim(); ++d) {
      if (gradient.size(d) > 1 && gradient.stride(d) != strides[static_cast<std::size_t>(d)]) return false;
    }
    return true;
  }();
  auto* slot = (*core_)->slot_ptr(index);
  if (fits && gradient.data_ptr() == slot) return mark_ready(index, gradient, incoming.defined());
  (*core_)->observe(index, static_cast<const std::uint8_t*>(gradient.const_data_ptr()));

  // A gradient that nobody else can see may move into its slot. One that autograd has just stolen shares its memory
  // with `incoming`, which the engine still holds.
  const bool stolen =
      incoming.defined() && incoming.has_storage() && incoming.storage().is_alias_of(gradient.storage());
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

void Reducer::place_zeros(std::size_t index) {
  const auto& watched = watched_[index];
  auto lease = (*core_)->take_slot(index);
  at::Tensor zeros;
  if (lease->ptr() != nullptr) {
    lease->zero();
    zeros = view_of(index, std::move(lease));
  } else {
    zeros = at::empty_strided(watched.sizes, watched.strides, watched.options).zero_();
  }
  zeros_.emplace_back(index, zeros);
  mark_ready(index, zeros, false);
}

void Reducer::mark_ready(std::size_t index, const at::Tensor& gradient, bool used) {
  checked([&] { (*core_)->mark_ready(index, static_cast<std::uint8_t*>(gradient.data_ptr()), used); });
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

void Reducer::finish() {
  const std::lock_guard lock(mutex_);
  // Nothing was accumulated (`torch.autograd.grad`), or nothing is to be reduced.
  if (mode_ != Mode::Reduced) return;
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  lend_on_this_thread(nullptr);
  const auto used = checked([&] {
    if ((*core_)->tracks_unused()) {
      for (const auto index : (*core_)->missing()) {
        auto& gradient = watched_[index].parameter.tensor.mutable_grad();
        if (gradient.defined()) {
          place(index, gradient, at::Tensor());
        } else {
          place_zeros(index);
        }
      }
    }
    return (*core_)->finish();
  });
  for (auto& [gradient, dense] : copy_back_) gradient.copy_(dense);
  for (auto& [index, value] : zeros_) {
    // What no rank used keeps no gradient, so that optimizers pass it over.
    if (used.empty() || used[index] != 0) watched_[index].parameter.tensor.mutable_grad() = std::move(value);
  }
  if (!buffers_.empty()) {
    broadcast(buffers_, 0);
    buffers_stale_ = false;
  }
}

void Reducer::leave(bool finished) {
  const std::lock_guard lock(mutex_);
  if (!finished && mode_ == Mode::Reduced) {
    (*core_)->abandon("its backward ended with an exception", !buffers_.empty());
  }
  lend_on_this_thread(nullptr);
  mode_ = Mode::Outside;
  copy_back_.clear();
  zeros_.clear();
  // Not kept beyond the step: the model may get others.
  buffers_.clear();
}

TORCH_LIBRARY_FRAGMENT(smd, m) {
  m.class_<Reducer>("Reducer")
      .def(torch::init([](std::vector<at::Tensor> parameters, std::vector<std::string> names, int64_t bucket_bytes,
                          int64_t first_bucket_bytes, bool find_unused_parameters, int64_t accumulation_steps,
                          int64_t group) {
        return Reducer::make(std::move(parameters), std::move(names), bucket_bytes, first_bucket_bytes,
                             find_unused_parameters, accumulation_steps, group);
      }))
      .def("set_sync", &Reducer::set_sync)
      .def("sync", &Reducer::sync)
      .def("sync_buffers", &Reducer::sync_buffers)
      .def("watch", &Reducer::watch)
      .def("broadcast", &Reducer::broadcast)
      .def("describe_plan", &Reducer::describe_plan);
}

}  // namespace smd::torch_ext
