// Buckets that communication hooks reduce.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>

#include <memory>
#include <utility>

#include "reducer.h"
#include "status.h"

namespace smd::torch_ext {

namespace {

// An alias that may be resized, which some hooks do. A larger size gives it memory of its own.
at::Tensor resizable_view(const at::Tensor& tensor) {
  const auto keep = [](void* kept) { delete static_cast<at::Tensor*>(kept); };
  c10::DataPtr data(tensor.data_ptr(), new at::Tensor(tensor), keep, tensor.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.nbytes(), std::move(data),
                       c10::GetAllocator(tensor.device().type()), /*resizable=*/true);
  return at::empty({0}, tensor.options()).set_(std::move(storage), 0, tensor.sizes(), tensor.strides());
}

}  // namespace

void Reducer::run_comm_hooks() {
  if (to_hook_.empty()) return;
  const auto arena = std::make_shared<rust::Box<Arena>>((*core_)->arena());
  for (const auto index : std::exchange(to_hook_, {})) {
    const auto plan = (*core_)->bucket(index);
    if (plan.elems == 0) {
      (*core_)->reduced_by_caller();
      continue;
    }
    HookedBucket hooked;
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
  // The hooks may run Python, so they are awaited before the mutex is taken.
  std::vector<at::Tensor> results;
  for (const auto& hooked : hooked_) results.push_back(await_comm_hook(comm_hook_, hooked.bucket->index()));
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto next = results.begin();
  for (auto& [bucket, buffer, home, elsewhere] : hooked_) {
    const auto& result = *next++;
    TORCH_CHECK_VALUE(result.numel() == home.numel(), "the communication hook returned ", result.numel(),
                      " elements of bucket ", bucket->index(), ", which has ", home.numel());
    if (result.const_data_ptr() != home.const_data_ptr()) home.copy_(result.view({-1}));
    for (auto& [gradient, place] : elsewhere) gradient.copy_(place);
    (*core_)->reduced_by_caller();
  }
}

}  // namespace smd::torch_ext
