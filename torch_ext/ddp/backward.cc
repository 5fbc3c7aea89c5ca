// Backward passes that are reduced: how autograd reports them to a reducer.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "ddp/sparse.h"
#include "reducer.h"
#include "status.h"

namespace smd::torch_ext {

using torch::autograd::variable_list;

// Runs after autograd has accumulated a parameter's gradient.
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

// Runs before the autograd node of a model output, that is, at the start of backward.
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

// Owned by the callback at the end of a backward. If the backward fails, autograd destroys the callback without calling
// it, and the destructor reports the failure.
class Reducer::Backward {
 public:
  explicit Backward(c10::intrusive_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() {
    if (!finished_) reducer_->leave(false);
  }

  // Releases the reducer at once. On a device's thread, this object may outlive `backward` and live into the next step.
  void finish() {
    reducer_->finish();
    finished_ = true;
    reducer_->leave(true);
  }

 private:
  c10::intrusive_ptr<Reducer> reducer_;
  bool finished_ = false;
};

void Reducer::add_hook(std::size_t index) {
  auto& watched = watched_[index];
  const auto self = c10::intrusive_ptr<Reducer>::reclaim_copy(this);
  watched.hook = watched.accumulator->add_post_hook(std::make_unique<Hook>(self, index));
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
    // A parameter whose data got another type or device has another gradient accumulator, on which there is no hook.
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

void Reducer::enter(bool sync) {
  if (mode_ != Mode::Outside) {
    wants_sync_ |= sync;
    return;
  }
  wants_sync_ = sync;
  // Autograd lists the nodes to execute only if it does not execute all.
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  accumulates_ = executed != nullptr && executed->empty();
  times_.backward_started();
  auto backward = std::make_shared<Backward>(c10::intrusive_ptr<Reducer>::reclaim_copy(this));
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  mode_ = Mode::Entered;
  if (!device_buckets_) place_on_this_thread(core_);
}

void Reducer::begin() {
  mode_ = checked([&] { return (*core_)->begin(wants_sync_ || must_sync_); }) ? Mode::Reduced : Mode::Local;
  if (comm_hook_ >= 0) gradients_.resize(watched_.size());
  if (device_buckets_) device_gradients_.assign(watched_.size(), std::nullopt);
}

void Reducer::on_gradient(std::size_t index, const variable_list& incoming) {
  const std::lock_guard lock(mutex_);
  if (has_rounds_) return on_accumulated(index, incoming);
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
      place(index, gradient, incoming[0], incoming[0].defined());
    } else {
      // A custom function may return no gradient, which means zero.
      TORCH_CHECK(!incoming[0].defined(), "the gradient of `", parameter.name,
                  "` was removed before it was reduced, by a hook of the parameter that sets `.grad` to None");
      place_zeros(index);
    }
    reduce_on_device();
  }
  run_comm_hooks();
}

void Reducer::finish() {
  const std::lock_guard lock(mutex_);
  if (mode_ == Mode::Entered && accumulates_ && has_hooks_) {
    // This rank's loss depends on no parameter, but another rank's may. Then the others receive zeros or an error. If
    // all parameters are frozen, as a discriminator's are while its generator trains, they are frozen on all ranks.
    const auto requires_gradient = [](const WatchedParameter& watched) {
      return watched.parameter.tensor.requires_grad();
    };
    if (std::any_of(watched_.begin(), watched_.end(), requires_gradient)) begin();
  }
  // `torch.autograd.grad` accumulates nothing, and in the other modes nothing is reduced.
  if (mode_ != Mode::Reduced) return;
  place_on_this_thread(nullptr);
  place_missing();
  complete();
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
    // A parameter that no rank used keeps its `.grad`: none, so that optimizers skip it, or an earlier one.
    const auto is_used = [&](std::size_t index) { return used.empty() || used[index] != 0; };
    for (auto& [index, value] : unused_gradients_) {
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
    (*core_)->abandon(
        has_rounds_ ? "its round of gradients ended with an exception" : "its backward ended with an exception",
        !buffers_.empty() || has_sparse_);
  }
  if (!places_) place_on_this_thread(nullptr);
  mode_ = Mode::Outside;
  must_sync_ = false;
  copy_back_.clear();
  unused_gradients_.clear();
  to_hook_.clear();
  to_reduce_.clear();
  device_gradients_.clear();
  gradient_streams_.clear();
  if (device_buckets_) device_buckets_->leave();
  hooked_.clear();
  gradients_.clear();
  held_.clear();
  std::fill(expected_.begin(), expected_.end(), 0);
  // The list is not kept beyond the step, because the model may get other buffers.
  buffers_.clear();
}

}  // namespace smd::torch_ext
