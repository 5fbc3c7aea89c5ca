// Kernels of the operations: operations.cc describes the tensors, and these functions call the core.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <string>

#include "completion.h"
#include "operations.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

// The blocking and the asynchronous kernel of an operation, made from the function that describes it.
template <auto describe>
struct Kernels;

template <class... Arguments, TensorOperation (*describe)(Arguments...)>
struct Kernels<describe> {
  static void blocking(Arguments... arguments) {
    checked([&] { run(describe(std::forward<Arguments>(arguments)...)); });
  }
  static c10::intrusive_ptr<Work> async(Arguments... arguments) {
    return checked([&] { return start(describe(std::forward<Arguments>(arguments)...)); });
  }
};

// The meta kernel of all blocking operations: they write to existing tensors, so there is nothing to do. One boxed
// kernel takes the arguments of any schema from the stack; a kernel for each would be compiled by itself.
void write_nothing(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, operation.schema().arguments().size());
}

template <class Register>
void each(Register&& add) {
  add("all_reduce_", Kernels<&all_reduce_>{});
  add("reduce_", Kernels<&reduce_>{});
  add("broadcast_", Kernels<&broadcast_>{});
  add("all_gather", Kernels<&all_gather>{});
  add("all_gather_single", Kernels<&all_gather_single>{});
  add("gather", Kernels<&gather>{});
  add("scatter", Kernels<&scatter>{});
  add("reduce_scatter", Kernels<&reduce_scatter>{});
  add("reduce_scatter_single", Kernels<&reduce_scatter_single>{});
  add("all_to_all", Kernels<&all_to_all>{});
  add("all_to_all_single", Kernels<&all_to_all_single>{});
  add("send", Kernels<&send>{});
  add("recv_", Kernels<&recv_>{});
}

}  // namespace

TORCH_LIBRARY_IMPL(smd, Meta, m) {
  each([&m](const std::string& name, auto) {
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&write_nothing>());
  });
}

// Registered for every backend. For a tensor that the library does not support, the adapter and the core have clearer
// errors than the dispatcher.
TORCH_LIBRARY_IMPL(smd, CompositeExplicitAutograd, m) {
  each([&m](const std::string& name, auto forms) {
    using F = decltype(forms);
    m.impl(name.c_str(), TORCH_FN(F::blocking));
    m.impl((name + "_async").c_str(), TORCH_FN(F::async));
  });
  m.impl("rank", [] { return checked([] { return static_cast<int64_t>(rank()); }); });
  m.impl("size", [] { return checked([] { return static_cast<int64_t>(size()); }); });
  m.impl("session_id", [] { return checked([] { return static_cast<int64_t>(session_id()); }); });
  m.impl("barrier", TORCH_FN(Kernels<&barrier>::blocking));
  m.impl("barrier_async", TORCH_FN(Kernels<&barrier>::async));
}

}  // namespace smd::torch_ext
