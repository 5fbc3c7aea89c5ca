// Where gradients lie when they are reduced.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "adapter.h"
#include "device.h"
#include "reducer.h"
#include "status.h"

namespace smd::torch_ext {

void Reducer::check(const WatchedParameter& watched, const at::Tensor& gradient) {
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

void Reducer::place(std::size_t index, at::Tensor& gradient, const at::Tensor& incoming, bool used) {
  const auto& [parameter, accumulator, hook, options, sizes, strides] = watched_[index];
  if (parameter.sparse) return mark_ready(index, at::Tensor(), used);
  check(watched_[index], gradient);
  if (gradient.requires_grad()) {
    TORCH_WARN_ONCE("the gradient of `", parameter.name,
                    "` has a graph of its own (`backward(create_graph=True)`): its values become the average over the "
                    "ranks, but its graph stays that of this rank");
    auto dense = at::empty_strided(sizes, strides, options);
    dense.copy_(gradient);
    copy_back_.emplace_back(gradient, dense);
    return mark_ready(index, dense, used);
  }
  // The strides of dimensions of size 1 are arbitrary, and an empty tensor has no layout.
  const auto fits = [&] {
    for (int64_t d = 0; d < gradient.dim(); ++d) {
      if (gradient.size(d) > 1 && gradient.stride(d) != strides[static_cast<std::size_t>(d)]) return false;
    }
    return true;
  }();
  // A gradient that autograd has just taken over from `incoming` shares its memory, and the engine still holds
  // `incoming`.
  const bool stolen =
      incoming.defined() && incoming.has_storage() && incoming.storage().is_alias_of(gradient.storage());
  if (device_buckets_) {
    if (fits) {
      mark_ready(index, gradient, used);
      if (auto& kept = device_gradients_[index]) kept->shared = gradient.storage().use_count() > (stolen ? 2 : 1);
      return;
    }
    auto dense = at::empty_strided(sizes, strides, options);
    dense.copy_(gradient);
    // The hook reduces the dense copy, whose values are copied back.
    if (comm_hook_ >= 0) copy_back_.emplace_back(gradient, dense);
    return mark_ready(index, dense, used);
  }
  const auto* made = static_cast<const std::uint8_t*>(gradient.const_data_ptr());
  if (fits && (*core_)->is_slot(index, made)) return mark_ready(index, gradient, used);
  (*core_)->observe(index, made);

  // A gradient to which nothing else refers may move into its slot.
  const bool ours = stolen || (gradient.use_count() == 1 && gradient.storage().use_count() == 1);
  if (ours) {
    auto lease = (*core_)->take_slot(index);
    if (lease->ptr() != nullptr) {
      if (fits) lease->fill(static_cast<const std::uint8_t*>(gradient.const_data_ptr()));
      auto view = view_of(index, std::move(lease));
      if (!fits) view.copy_(gradient);
      gradient = std::move(view);
      return mark_ready(index, gradient, used);
    }
  }
  if (fits) return mark_ready(index, gradient, used);
  auto dense = at::empty_strided(sizes, strides, options);
  dense.copy_(gradient);
  copy_back_.emplace_back(gradient, dense);
  mark_ready(index, dense, used);
}

void Reducer::place_copy(std::size_t index, const at::Tensor& gradient) {
  const auto& watched = watched_[index];
  if (watched.parameter.sparse) return mark_ready(index, at::Tensor(), false);
  check(watched, gradient);
  auto copy = at::empty_strided(watched.sizes, watched.strides, watched.options);
  copy.copy_(gradient);
  unused_gradients_.emplace_back(index, copy);
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
  unused_gradients_.emplace_back(index, zeros);
  mark_ready(index, zeros, false);
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
  for (const auto index : checked([&] { return (*core_)->unused_parameters({frozen.data(), frozen.size()}); })) {
    auto& gradient = watched_[index].parameter.tensor.mutable_grad();
    if (!gradient.defined()) {
      place_zeros(index);
    } else if (may_leave_unused_) {
      place_copy(index, gradient);
    } else {
      place(index, gradient, at::Tensor(), false);
    }
  }
  reduce_on_device();
}

void Reducer::mark_ready(std::size_t index, const at::Tensor& gradient, bool used) {
  // On a device, gradients are held by `device_gradients_` until they are packed.
  if (has_rounds_ && (!device_buckets_ || comm_hook_ >= 0)) held_.push_back(gradient);
  auto* data = gradient.defined() ? static_cast<std::uint8_t*>(gradient.data_ptr()) : nullptr;
  const auto full = checked([&] { return (*core_)->mark_ready(index, data, used); });
  if (device_buckets_ && comm_hook_ < 0) {
    if (gradient.defined()) {
      const auto stream = current_stream(gradient.device());
      device_gradients_[index] = {gradient, stream};
      auto& streams = gradient_streams_;
      if (has_rounds_ && std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
    }
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
  const auto drop_lease = [](void* raw) { rust::Box<SlotLease>::from_raw(static_cast<SlotLease*>(raw)); };
  return at::for_blob(data, watched.sizes)
      .strides(watched.strides)
      .context(lease.into_raw(), drop_lease)
      .options(watched.options)
      .make_tensor();
}

void Reducer::reduce_on_device() {
  for (const auto index : std::exchange(to_reduce_, {})) {
    const auto& plan = device_buckets_->reduce(index, device_gradients_);
    for (const auto param : plan.params) {
      auto& gradient = device_gradients_[param];
      if (!gradient) continue;
      const auto is_for = [&](const auto& unused_gradient) { return unused_gradient.first == param; };
      const auto unused_gradient = std::find_if(unused_gradients_.begin(), unused_gradients_.end(), is_for);
      if (unused_gradient != unused_gradients_.end()) {
        unused_gradient->second = std::move(gradient->value);
      } else {
        watched_[param].parameter.tensor.mutable_grad() = std::move(gradient->value);
      }
      gradient.reset();
    }
  }
}

}  // namespace smd::torch_ext
