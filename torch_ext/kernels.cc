// Kernels of the operations: operations.cc describes the tensors, and these functions call the core.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>

#include "boxed.h"
#include "completion.h"
#include "operations.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

// Describes an operation by its arguments on the stack.
using Describe = TensorOperation (*)(Stack& stack);

void run_described(Describe describe, Stack& stack, std::size_t arity) {
  checked([&] { run(describe(stack)); });
  return_nothing(stack, arity);
}

void start_described(Describe describe, Stack& stack, std::size_t arity) {
  return_value(stack, arity, checked([&] { return start(describe(stack)); }));
}

// The blocking and the asynchronous kernel of an operation, made from the function that describes it.
template <auto describe>
struct Kernels {
  static constexpr auto kArity = arity_of(describe);

  static TensorOperation described(Stack& stack) {
    return call_with(describe, stack, std::make_index_sequence<kArity>());
  }
  static void blocking(const c10::OperatorHandle&, Stack* stack) { run_described(&described, *stack, kArity); }
  static void async(const c10::OperatorHandle&, Stack* stack) { start_described(&described, *stack, kArity); }
};

// The meta kernel of all blocking operations: they write to existing tensors, so there is nothing to do.
void write_nothing(const c10::OperatorHandle& operation, Stack* stack) {
  return_nothing(*stack, operation.schema().arguments().size());
}

int64_t session_rank() {
  return checked([] { return static_cast<int64_t>(rank()); });
}

int64_t session_size() {
  return checked([] { return static_cast<int64_t>(size()); });
}

int64_t current_session_id() {
  return checked([] { return static_cast<int64_t>(session_id()); });
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
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&F::blocking>());
    m.impl((name + "_async").c_str(), torch::CppFunction::makeFromBoxedFunction<&F::async>());
  });
  m.impl("rank", boxed<&session_rank>());
  m.impl("size", boxed<&session_size>());
  m.impl("session_id", boxed<&current_session_id>());
  m.impl("barrier", torch::CppFunction::makeFromBoxedFunction<&Kernels<&barrier>::blocking>());
  m.impl("barrier_async", torch::CppFunction::makeFromBoxedFunction<&Kernels<&barrier>::async>());
}

}  // namespace smd::torch_ext
