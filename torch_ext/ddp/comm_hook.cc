#include "ddp/comm_hook.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <utility>

#include "boxed.h"

namespace smd::torch_ext {

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& [parameter, start, strides] : slots_) {
    gradients.push_back(buffer_.as_strided(parameter.sizes(), strides, buffer_.storage_offset() + start));
  }
  return gradients;
}

std::vector<at::Tensor> GradBucket::parameters() const {
  std::vector<at::Tensor> parameters;
  for (const auto& slot : slots_) parameters.push_back(slot.parameter);
  return parameters;
}

namespace {

// These operations have their implementation in Python (parallel/comm_hooks.py). The dispatcher takes Python's lock and
// passes Python's exceptions through autograd unchanged.
const c10::OperatorHandle& operation(const char* name) {
  return *new c10::OperatorHandle(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""));
}

}  // namespace

void start_comm_hook(int64_t hook, const c10::intrusive_ptr<GradBucket>& bucket) {
  static const auto& start = operation("smd::start_comm_hook");
  torch::jit::Stack stack{hook, c10::IValue(bucket)};
  start.callBoxed(stack);
}

at::Tensor await_comm_hook(int64_t hook, int64_t bucket) {
  static const auto& await = operation("smd::await_comm_hook");
  torch::jit::Stack stack{hook, bucket};
  await.callBoxed(stack);
  return stack.back().toTensor();
}

TORCH_LIBRARY_FRAGMENT(smd, m) {
  BoxedClass<GradBucket>(m, "GradBucket")
      .def<&GradBucket::index>("index() -> int")
      .def<&GradBucket::is_last>("is_last() -> bool")
      .def<&GradBucket::buffer>("buffer() -> Tensor")
      .def<&GradBucket::set_buffer>("set_buffer(Tensor buffer) -> NoneType")
      .def<&GradBucket::gradients>("gradients() -> Tensor[]")
      .def<&GradBucket::parameters>("parameters() -> Tensor[]");
  m.def("start_comm_hook(int hook, __torch__.torch.classes.smd.GradBucket bucket) -> ()");
  m.def("await_comm_hook(int hook, int bucket) -> Tensor");
}

}  // namespace smd::torch_ext
