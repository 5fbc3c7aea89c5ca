#include "boxed.h"

#include <torch/csrc/jit/frontend/function_schema_parser.h>

namespace smd::torch_ext {

c10::SymInt unboxed(const c10::IValue& value, As<c10::SymInt>) { return value.toSymInt(); }

std::vector<at::Tensor> unboxed(const c10::IValue& value, As<std::vector<at::Tensor>>) {
  return value.toTensorVector();
}

std::vector<int64_t> unboxed(const c10::IValue& value, As<std::vector<int64_t>>) { return value.toIntVector(); }

std::vector<std::string> unboxed(const c10::IValue& value, As<std::vector<std::string>>) {
  std::vector<std::string> texts;
  for (const auto& text : value.toListRef()) texts.push_back(text.toStringRef());
  return texts;
}

std::optional<at::Tensor> unboxed(const c10::IValue& value, As<std::optional<at::Tensor>>) {
  return value.isNone() ? std::nullopt : std::make_optional(value.toTensor());
}

std::optional<std::vector<int64_t>> unboxed(const c10::IValue& value, As<std::optional<at::IntArrayRef>>) {
  return value.isNone() ? std::nullopt : std::make_optional(value.toIntVector());
}

c10::List<bool> unboxed(const c10::IValue& value, As<const c10::List<bool>&>) { return value.toBoolList(); }

c10::List<std::optional<at::Tensor>> unboxed(const c10::IValue& value,
                                             As<const c10::List<std::optional<at::Tensor>>&>) {
  return value.toOptionalTensorList();
}

c10::Dict<std::string, int64_t> unboxed(const c10::IValue& value, As<const c10::Dict<std::string, int64_t>&>) {
  return c10::impl::toTypedDict<std::string, int64_t>(value.toGenericDict());
}

void return_nothing(Stack& stack, std::size_t count) { torch::jit::drop(stack, count); }

void return_value(Stack& stack, std::size_t count, c10::IValue result) {
  torch::jit::drop(stack, count);
  stack.push_back(std::move(result));
}

c10::FunctionSchema method_schema(const char* name, const std::string& schema) {
  auto text = schema;
  const auto parameters = text.find('(') + 1;
  const auto self = std::string("__torch__.torch.classes.smd.") + name + " self";
  text.insert(parameters, text[parameters] == ')' ? self : self + ", ");
  return torch::jit::parseSchema(text);
}

void set_object(Stack& stack, std::size_t arity, c10::IValue capsule) {
  stack[stack.size() - arity - 1].toObject()->setSlot(0, std::move(capsule));
  return_value(stack, arity + 1, c10::IValue());
}

}  // namespace smd::torch_ext
