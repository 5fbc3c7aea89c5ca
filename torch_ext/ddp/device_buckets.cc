#include "ddp/device_buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "adapter.h"
#include "device.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::Float16:
      return at::kHalf;
    case DType::BFloat16:
      return at::kBFloat16;
    default:
      TORCH_INTERNAL_ASSERT(false, "gradients are sent in their own type or as 16-bit floats");
  }
}

}  // namespace

DeviceBuckets::~DeviceBuckets() {
  leave();
  for (auto& bucket : buckets_) let_go(bucket);
}

const BucketDescription& DeviceBuckets::reduce(std::size_t index, std::vector<std::optional<Gradient>>& gradients) {
  if (const auto plan = (*core_)->plan_number(); plan != plan_ || buckets_.empty()) {
    for (auto& bucket : buckets_) let_go(bucket);
    buckets_.clear();
    const auto count = (*core_)->num_buckets();
    for (std::size_t i = 0; i < count; ++i) buckets_.push_back({(*core_)->bucket(i), {}, {}});
    plan_ = plan;
  }
  auto& bucket = buckets_.at(index);
  const auto& plan = bucket.plan;
  if (plan.elems > 0 && (!bucket.flat.defined() || is_held(bucket, gradients))) allocate(bucket);
  bucket.views.resize(plan.params.size());

  const auto stream = current_stream(device_);
  const bool compressed = plan.wire != plan.dtype;
  std::vector<Piece> pieces;
  // Tensors that are packed must live until the packing kernel is queued.
  std::vector<at::Tensor> packed;
  std::vector<TensorView> in_place;
  for (std::size_t i = 0; i < plan.params.size(); ++i) {
    auto& gradient = gradients[plan.params[i]];
    if (!gradient || gradient->value.numel() == 0) continue;
    auto& value = gradient->value;
    if (gradient->stream != stream) {
      c10::Event made(device_.type());
      made.record(gradient->stream);
      made.block(stream);
      record_use(value.storage(), stream);
    }
    if (plan.in_place[i]) {
      if (gradient->shared) {
        const auto& layout = layouts_[plan.params[i]];
        value = at::empty_strided(layout.sizes, layout.strides, layout.options).copy_(value);
      }
      in_place.push_back(describe(value));
      in_flight_.push_back(*gradient);
      continue;
    }
    auto* data = static_cast<std::uint8_t*>(value.data_ptr());
    const auto& view = bucket.views[i];
    if (compressed || data != view.data_ptr()) {
      pieces.push_back({data, plan.starts[i], static_cast<std::size_t>(value.numel())});
    }
    // A gradient that was accumulated in its view stays the same tensor.
    if (data != view.data_ptr()) packed.push_back(std::exchange(value, view.variable_data()));
  }
  if (plan.elems == 0 && in_place.empty()) {
    (*core_)->reduced_by_caller();
    return plan;
  }
  const auto communication = communication_stream(static_cast<std::int64_t>((*core_)->group()), device_);
  std::vector<TensorView> flat;
  std::vector<TensorView> wire;
  if (plan.elems > 0) flat.push_back(describe(bucket.flat));
  if (plan.elems > 0 && compressed) {
    const auto options = bucket.flat.options().dtype(scalar_type_of(plan.wire));
    // Zeroed, because slots have gaps between them.
    const auto narrow = plan.params.size() > 1 ? at::zeros({static_cast<int64_t>(plan.elems)}, options)
                                               : at::empty({static_cast<int64_t>(plan.elems)}, options);
    wire.push_back(describe(narrow));
    // The reduction is queued later, possibly by another thread. Recording the use when the tensor is released would be
    // too early.
    in_flight_.push_back({narrow, stream});
  }
  DeviceBucket full;
  full.pieces = {pieces.data(), pieces.size()};
  full.flat = {flat.data(), flat.size()};
  full.wire = {wire.data(), wire.size()};
  full.in_place = {in_place.data(), in_place.size()};
  full.stream = handle_of(stream);
  checked([&] { (*core_)->launch(index, full, handle_of(communication)); });
  return plan;
}

void DeviceBuckets::follow() {
  const auto here = current_stream(device_);
  checked([&] { (*core_)->follow(handle_of(here)); });
  // Memory that this stream releases from now on is reused after the reduction.
  const auto is_safe = [&](const Gradient& gradient) { return gradient.stream == here; };
  in_flight_.erase(std::remove_if(in_flight_.begin(), in_flight_.end(), is_safe), in_flight_.end());
  leave();
}

void DeviceBuckets::leave() noexcept {
  for (const auto& gradient : std::exchange(in_flight_, {})) protect(gradient.value);
}

bool DeviceBuckets::is_held(const Bucket& bucket, const std::vector<std::optional<Gradient>>& gradients) {
  for (std::size_t i = 0; i < bucket.views.size(); ++i) {
    const auto& view = bucket.views[i];
    const auto& gradient = gradients[bucket.plan.params[i]];
    if (!view.defined() || view.numel() == 0) continue;
    // A gradient that was accumulated in its view may be overwritten, even if the script refers to it.
    if (gradient && gradient->value.data_ptr() == view.data_ptr()) continue;
    if (view.storage().use_count() > 1) return true;
  }
  return false;
}

void DeviceBuckets::allocate(Bucket& bucket) const {
  let_go(bucket);
  const auto& plan = bucket.plan;
  const auto& options = layouts_[plan.params[0]].options;
  // The gaps between slots are reduced, too, and must hold valid numbers.
  bucket.flat = at::zeros({static_cast<int64_t>(plan.elems)}, options);
  bucket.views.resize(plan.params.size());
  for (std::size_t i = 0; i < plan.params.size(); ++i) {
    if (plan.in_place[i]) continue;
    const auto& layout = layouts_[plan.params[i]];
    auto* start = static_cast<std::uint8_t*>(bucket.flat.data_ptr()) + plan.starts[i] * bucket.flat.element_size();
    const auto let_go = [](void* flat) { delete static_cast<at::Tensor*>(flat); };
    bucket.views[i] = at::for_blob(start, layout.sizes)
                          .strides(layout.strides)
                          .context(new at::Tensor(bucket.flat), let_go)
                          .options(layout.options)
                          .make_tensor();
  }
}

void DeviceBuckets::let_go(Bucket& bucket) const noexcept {
  // A backward that failed may have left a reduction in flight.
  if (bucket.flat.defined()) protect(bucket.flat);
  bucket.views.clear();
  bucket.flat.reset();
}

void DeviceBuckets::protect(const at::Tensor& tensor) const noexcept {
  try {
    record_use(tensor.storage(), communication_stream(static_cast<std::int64_t>((*core_)->group()), device_));
  } catch (...) {
    // The process is ending, or the device has failed: nothing will use the memory.
  }
}

}  // namespace smd::torch_ext
