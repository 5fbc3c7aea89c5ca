// Registers C++ functions as boxed kernels and as methods of classes, with their schemas.
//
// - BOX-1: `torch.ops.smd` and methods of `torch.classes.smd` are called from Python, which passes boxed arguments on a
//   stack. A function is registered for such calls only. PyTorch's own registration adds an entry point for unboxed
//   calls and infers each schema from the function's type. That would take a fifth of the compile time of this library.
// - BOX-2: the types of a function agree with its schema. PyTorch checks the arguments against the schema.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace smd::torch_ext {

using torch::jit::Stack;

// Conversions of boxed arguments, by the type of the function's parameter. A parameter may be a view, such as
// `at::TensorList`; the conversion then returns the vector that is viewed, which lives until the end of the call.
template <class Parameter>
struct As {};

inline const at::Tensor& unboxed(const c10::IValue& value, As<const at::Tensor&>) { return value.toTensor(); }
inline const at::Tensor& unboxed(const c10::IValue& value, As<at::Tensor>) { return value.toTensor(); }
inline int64_t unboxed(const c10::IValue& value, As<int64_t>) { return value.toInt(); }
inline double unboxed(const c10::IValue& value, As<double>) { return value.toDouble(); }
inline bool unboxed(const c10::IValue& value, As<bool>) { return value.toBool(); }
inline const std::string& unboxed(const c10::IValue& value, As<std::string>) { return value.toStringRef(); }
inline const std::string& unboxed(const c10::IValue& value, As<const std::string&>) { return value.toStringRef(); }
inline const std::string& unboxed(const c10::IValue& value, As<std::string_view>) { return value.toStringRef(); }
c10::SymInt unboxed(const c10::IValue& value, As<c10::SymInt>);
std::vector<at::Tensor> unboxed(const c10::IValue& value, As<std::vector<at::Tensor>>);
std::vector<int64_t> unboxed(const c10::IValue& value, As<std::vector<int64_t>>);
std::vector<std::string> unboxed(const c10::IValue& value, As<std::vector<std::string>>);
std::optional<at::Tensor> unboxed(const c10::IValue& value, As<std::optional<at::Tensor>>);
std::optional<std::vector<int64_t>> unboxed(const c10::IValue& value, As<std::optional<at::IntArrayRef>>);
c10::List<bool> unboxed(const c10::IValue& value, As<const c10::List<bool>&>);
c10::List<std::optional<at::Tensor>> unboxed(const c10::IValue& value, As<const c10::List<std::optional<at::Tensor>>&>);
c10::Dict<std::string, int64_t> unboxed(const c10::IValue& value, As<const c10::Dict<std::string, int64_t>&>);

inline std::vector<at::Tensor> unboxed(const c10::IValue& value, As<at::TensorList>) {
  return unboxed(value, As<std::vector<at::Tensor>>());
}
inline std::vector<at::Tensor> unboxed(const c10::IValue& value, As<const std::vector<at::Tensor>&>) {
  return unboxed(value, As<std::vector<at::Tensor>>());
}
inline std::vector<int64_t> unboxed(const c10::IValue& value, As<at::IntArrayRef>) {
  return unboxed(value, As<std::vector<int64_t>>());
}
inline std::vector<int64_t> unboxed(const c10::IValue& value, As<const std::vector<int64_t>&>) {
  return unboxed(value, As<std::vector<int64_t>>());
}
template <class Class>
c10::intrusive_ptr<Class> unboxed(const c10::IValue& value, As<const c10::intrusive_ptr<Class>&>) {
  return value.toCustomClass<Class>();
}
template <class Class>
std::optional<c10::intrusive_ptr<Class>> unboxed(const c10::IValue& value,
                                                 As<const std::optional<c10::intrusive_ptr<Class>>&>) {
  if (value.isNone()) return std::nullopt;
  return value.toCustomClass<Class>();
}

// Replaces the `count` arguments on the stack by the result.
void return_nothing(Stack& stack, std::size_t count);
void return_value(Stack& stack, std::size_t count, c10::IValue result);

// Calls `function` with the arguments on the stack and leaves them there.
template <class Result, class... Parameters, std::size_t... at>
Result call_with(Result (*function)(Parameters...), Stack& stack, std::index_sequence<at...>) {
  [[maybe_unused]] const c10::IValue* first = stack.data() + stack.size() - sizeof...(Parameters);
  return function(unboxed(first[at], As<Parameters>())...);
}

template <class Result, class... Parameters>
constexpr std::size_t arity_of(Result (*)(Parameters...)) {
  return sizeof...(Parameters);
}

template <auto function>
void call_boxed(const c10::OperatorHandle&, Stack* stack) {
  constexpr auto arity = arity_of(function);
  using Result = decltype(call_with(function, *stack, std::make_index_sequence<arity>()));
  if constexpr (std::is_void_v<Result>) {
    call_with(function, *stack, std::make_index_sequence<arity>());
    return_nothing(*stack, arity);
  } else {
    return_value(*stack, arity, c10::IValue(call_with(function, *stack, std::make_index_sequence<arity>())));
  }
}

// The kernel that calls `function`, for `torch::Library::impl` and `def`.
template <auto function>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<&call_boxed<function>>();
}

// Parses the schema of a method of class `name`, and adds the object as the first parameter.
c10::FunctionSchema method_schema(const char* name, const std::string& schema);
// Ends the call of a constructor with `arity` parameters: stores the object that it has made.
void set_object(Stack& stack, std::size_t arity, c10::IValue capsule);

// A class for Python. Classes that its methods return are registered before it.
template <class Class>
class BoxedClass {
 public:
  BoxedClass(torch::Library& m, const char* name) : name_(name), class_(m.class_<Class>(name)) {}

  // Adds a method. `schema` is its name, its parameters after the object itself, and its result, as in
  // `last(int count) -> int[]`; `-> NoneType` for a method without a result.
  template <auto method>
  BoxedClass& def(const char* schema) {
    return add(schema, &Method<decltype(method), method>::call);
  }

  // Adds the constructor. `function` returns an intrusive pointer to the object; `parameters` are as in a schema.
  template <auto function>
  BoxedClass& init(const char* parameters) {
    return add((std::string("__init__(") + parameters + ") -> NoneType").c_str(), &construct<function>);
  }

 private:
  template <class Type, auto method>
  struct Method;
  template <class Result, class... Parameters, Result (Class::*method)(Parameters...)>
  struct Method<Result (Class::*)(Parameters...), method> {
    static void call(Stack& stack) { call_method<Result, method, Parameters...>(stack); }
  };
  template <class Result, class... Parameters, Result (Class::*method)(Parameters...) const>
  struct Method<Result (Class::*)(Parameters...) const, method> {
    static void call(Stack& stack) { call_method<Result, method, Parameters...>(stack); }
  };

  template <class Result, auto method, class... Parameters>
  static void call_method(Stack& stack) {
    constexpr auto arity = sizeof...(Parameters) + 1;
    const auto self = object(stack[stack.size() - arity]);
    const auto call = [&]() {
      return apply<Result, method, Parameters...>(*self, stack, std::make_index_sequence<arity - 1>());
    };
    if constexpr (std::is_void_v<Result>) {
      call();
      return_value(stack, arity, c10::IValue());
    } else {
      return_value(stack, arity, c10::IValue(call()));
    }
  }

  template <class Result, auto method, class... Parameters, std::size_t... at>
  static Result apply(Class& self, Stack& stack, std::index_sequence<at...>) {
    [[maybe_unused]] const c10::IValue* first = stack.data() + stack.size() - sizeof...(Parameters);
    return (self.*method)(unboxed(first[at], As<Parameters>())...);
  }

  template <auto function>
  static void construct(Stack& stack) {
    constexpr auto arity = arity_of(function);
    auto made = call_with(function, stack, std::make_index_sequence<arity>());
    set_object(stack, arity, c10::IValue::make_capsule(std::move(made)));
  }

  static c10::intrusive_ptr<Class> object(const c10::IValue& value) { return value.toCustomClass<Class>(); }

  BoxedClass& add(const char* schema, void (*function)(Stack&)) {
    auto parsed = method_schema(name_, schema);
    const auto name = parsed.name();
    class_._def_unboxed(name, function, std::move(parsed));
    return *this;
  }

  const char* name_;
  torch::class_<Class> class_;
};

}  // namespace smd::torch_ext
