// Rounds: reductions that begin and end when their caller says so.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "device.h"
#include "reducer.h"
#include "status.h"

namespace smd::torch_ext {

void Reducer::open() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(has_rounds_, "this reducer has no rounds: its reductions begin and end with a backward");
  checked([&] { (*core_)->begin(true); });
  start_round();
}

c10::intrusive_ptr<Ballot> Reducer::open_by_vote(int64_t process_set, const std::string& name,
                                                 const std::string& what) {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(has_rounds_, "this reducer has no rounds: its reductions begin and end with a backward");
  auto ballot = checked([&] { return (*core_)->begin_by_vote(process_set_group(process_set), name, what); });
  start_round();
  return c10::make_intrusive<Ballot>(std::move(ballot));
}

void Reducer::start_round() {
  mode_ = Mode::Reduced;
  failure_ = nullptr;
  if (comm_hook_ >= 0) gradients_.resize(watched_.size());
  if (device_buckets_) device_gradients_.assign(watched_.size(), std::nullopt);
}

void Reducer::expect(const std::vector<int64_t>& accumulations) {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  TORCH_CHECK(mode_ == Mode::Reduced, "gradients were expected outside a round");
  TORCH_CHECK_VALUE(accumulations.size() == expected_.size(), "there are ", expected_.size(), " parameters, not ",
                    accumulations.size());
  expected_ = accumulations;
}

void Reducer::place_in_backward() {
  if (device_buckets_ || std::exchange(places_, true)) return;
  // If the backward fails, autograd destroys the callback without calling it.
  const auto end = [self = c10::intrusive_ptr<Reducer>::reclaim_copy(this)](const bool* raw) {
    delete raw;
    const std::lock_guard lock(self->mutex_);
    self->places_ = false;
    place_on_this_thread(nullptr);
  };
  auto backward = std::shared_ptr<const bool>(new bool(true), end);
  torch::autograd::Engine::get_default_engine().queue_callback(
      [backward = std::move(backward)]() mutable { backward.reset(); });
  place_on_this_thread(core_);
}

void Reducer::on_accumulated(std::size_t index, const torch::autograd::variable_list& incoming) {
  place_in_backward();
  // Without a gradient, autograd accumulates nothing and calls no hook of the script.
  if (!incoming[0].defined() || expected_[index] == 0 || --expected_[index] > 0) return;
  // A gradient that a hook has set to none takes no part.
  if (watched_[index].parameter.tensor.grad().defined()) place_gradients({index}, incoming[0]);
}

void Reducer::ready(const std::vector<int64_t>& indices) {
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  TORCH_CHECK(mode_ == Mode::Reduced, "gradients are ready outside a round");
  for (const auto index : indices) {
    const auto& parameter = watched_.at(static_cast<std::size_t>(index)).parameter;
    TORCH_CHECK(parameter.tensor.grad().defined(), "`", parameter.name, "` has no gradient that could be reduced");
  }
  place_gradients({indices.begin(), indices.end()}, at::Tensor());
}

void Reducer::place_gradients(const std::vector<std::size_t>& indices, const at::Tensor& incoming) {
  try {
    {
      const at::NoGradGuard no_grad;
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const auto index : indices) {
        auto& gradient = watched_[index].parameter.tensor.mutable_grad();
        make_dense(gradient);
        place(index, gradient, incoming, true);
      }
      reduce_on_device();
    }
    run_comm_hooks();
  } catch (...) {
    failure_ = std::current_exception();
    // Ends the round on the other ranks, too.
    leave(false);
  }
}

// Converts a sparse gradient of a parameter with a slot to a dense one.
void Reducer::make_dense(at::Tensor& gradient) {
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
}

std::vector<int64_t> Reducer::missing() const {
  const auto missing = (*core_)->missing();
  return {missing.begin(), missing.end()};
}

void Reducer::close() {
  const std::lock_guard lock(mutex_);
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  TORCH_CHECK(mode_ == Mode::Reduced, "a round ended that had not begun");
  const auto end = std::shared_ptr<bool>(new bool(false), [this](const bool* finished) {
    leave(*finished);
    delete finished;
  });
  place_missing();
  complete();
  *end = true;
}

void Reducer::cancel() {
  const std::lock_guard lock(mutex_);
  failure_ = nullptr;
  if (!has_rounds_ || mode_ != Mode::Reduced) return;
  // The streams are recorded before `leave` forgets them.
  const auto end = std::shared_ptr<void>(nullptr, [this](void*) { leave(false); });
  follow_gradients();
}

void Reducer::follow_gradients() {
  if (!device_buckets_) return;
  const auto here = current_stream(watched_[0].options.device());
  for (const auto& stream : gradient_streams_) {
    if (stream == here) continue;
    c10::Event made(stream.device_type());
    made.record(stream);
    made.block(here);
  }
}

void Reducer::await_device() {
  if (device_buckets_ && (*core_)->is_current()) checked([&] { (*core_)->await_device(); });
}

bool Reducer::fits() const {
  if (!(*core_)->is_current()) return false;
  for (const auto& watched : watched_) {
    const auto& tensor = watched.parameter.tensor;
    if (!tensor.requires_grad() || tensor.sizes() != at::IntArrayRef(watched.sizes) ||
        tensor.dtype() != watched.options.dtype() || tensor.device() != watched.options.device()) {
      return false;
    }
    // A parameter whose data was replaced may have another gradient accumulator, on which there is no hook.
    if (has_hooks_ && torch::autograd::impl::try_get_grad_accumulator(tensor) != watched.accumulator) return false;
  }
  return true;
}

}  // namespace smd::torch_ext
