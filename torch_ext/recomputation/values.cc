#include "recomputation/values.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace smd::torch_ext {

Layout::Layout(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      dtype(tensor.scalar_type()),
      device(tensor.device()) {}

at::Tensor Layout::in(c10::Storage storage) const {
  auto tensor = at::empty({0}, at::TensorOptions().dtype(dtype).device(device));
  tensor.set_(std::move(storage), offset, sizes, strides);
  return tensor;
}

int64_t Layout::bytes() const { return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype)); }

Use::Use(c10::intrusive_ptr<RecomputedValue> value) : value_(std::move(value)) {
  const std::lock_guard lock(value_->mutex_);
  ++value_->waiting_;
}

Use::Use(Use&& other) noexcept
    : value_(std::move(other.value_)), is_counted_(std::exchange(other.is_counted_, false)) {}

Use::~Use() {
  if (!is_counted_) return;
  // Freed after the lock.
  std::optional<c10::Storage> last;
  const std::lock_guard lock(value_->mutex_);
  if (--value_->waiting_ == 0 && !value_->is_kept_) last.swap(value_->result_);
}

c10::Storage Use::take() {
  std::optional<c10::Storage> result;
  {
    const std::lock_guard lock(value_->mutex_);
    result = value_->result_;
  }
  if (!result) result = value_->compute();
  std::optional<c10::Storage> last;
  const std::lock_guard lock(value_->mutex_);
  // A second backward of the same graph takes the value again; it is computed again then.
  if (std::exchange(is_counted_, false)) --value_->waiting_;
  if (value_->is_kept_) return *value_->result_;
  last.swap(value_->result_);
  if (value_->waiting_ > 0) value_->result_ = result;
  return *result;
}

RecomputedValue::RecomputedValue(c10::OperatorHandle operation, std::vector<Argument> arguments, Layout layout,
                                 int64_t depth)
    : operation_(std::move(operation)), arguments_(std::move(arguments)), layout_(std::move(layout)), depth_(depth) {}

void RecomputedValue::keep(c10::Storage value) {
  const std::lock_guard lock(mutex_);
  result_ = std::move(value);
  is_kept_ = true;
}

bool RecomputedValue::is_valid() const {
  return std::all_of(arguments_.begin(), arguments_.end(), [](const Argument& argument) {
    const auto* source = std::get_if<Source>(&argument);
    return source == nullptr || source->version.is_current();
  });
}

c10::Storage RecomputedValue::compute() {
  // Autograd's words for its own check, which the hooks that drop tensors turn off.
  TORCH_CHECK(is_valid(),
              "one of the variables needed for gradient computation has been modified by an inplace operation: ",
              "an argument of ", operation_.operator_name(), ", whose result is computed again");
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // The arguments are those of the operation after casts by autocast.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  torch::jit::Stack stack;
  for (auto& argument : arguments_) {
    if (auto* other = std::get_if<c10::IValue>(&argument)) {
      stack.push_back(*other);
      continue;
    }
    auto& source = std::get<Source>(argument);
    auto* kept = std::get_if<c10::Storage>(&source.storage);
    stack.emplace_back(source.layout.in(kept != nullptr ? *kept : std::get<Use>(source.storage).take()));
  }
  operation_.callBoxed(&stack);
  const auto result = stack.back().toTensor();
  const bool is_same = result.sizes() == at::IntArrayRef(layout_.sizes) &&
                       result.strides() == at::IntArrayRef(layout_.strides) && result.scalar_type() == layout_.dtype &&
                       result.storage_offset() == layout_.offset;
  TORCH_CHECK(is_same, operation_.operator_name(), " has another layout or type than in the forward: ", result.sizes(),
              " of ", result.scalar_type(), " instead of ", at::IntArrayRef(layout_.sizes), " of ", layout_.dtype);
  return result.storage();
}

DroppedTensor::DroppedTensor(c10::intrusive_ptr<RecomputedValue> value, Layout layout)
    : use_(std::move(value)), layout_(std::move(layout)) {}

at::Tensor DroppedTensor::compute() { return layout_.in(use_.take()); }

}  // namespace smd::torch_ext
