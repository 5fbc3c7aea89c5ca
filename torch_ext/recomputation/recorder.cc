#include "recomputation/recorder.h"

#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "boxed.h"

namespace smd::torch_ext {

namespace {

// The bytes that an operation may read and write for each byte that is freed: its result and one argument, besides
// small ones such as the weight of a norm.
constexpr double kMovedForEachByte = 2.5;

// The recorder of this thread.
thread_local PointwiseRecorder* active_recorder = nullptr;

bool is_strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_conj() &&
         !tensor.is_neg() && !tensor.key_set().has(c10::DispatchKey::Python) &&
         !tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper) &&
         !tensor.key_set().has(c10::DispatchKey::FuncTorchBatched) && !tensor.is_meta();
}

c10::StorageImpl* storage_key(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

std::string full_name(const c10::OperatorName& name) { return name.name + "." + name.overload_name; }

}  // namespace

// A running operation. Operations call others, so they are stacked.
struct PointwiseRecorder::Context : at::ObserverContext {
  ~Context() override {
    if (active_recorder != nullptr && is_product) --active_recorder->products_;
  }

  // The call, if it can be repeated.
  std::shared_ptr<Call> call;
  bool is_product = false;
};

void PointwiseRecorder::start() {
  TORCH_CHECK(active_recorder == nullptr, "another recorder observes this thread");
  active_recorder = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&enter, &leave)
                                           .needsInputs(true)
                                           .needsOutputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

void PointwiseRecorder::stop() {
  if (!handle_) return;
  at::removeCallback(*std::exchange(handle_, std::nullopt));
  active_recorder = nullptr;
}

std::unique_ptr<at::ObserverContext> PointwiseRecorder::enter(const at::RecordFunction& function) {
  const auto name = function.operator_name();
  if (active_recorder == nullptr || !name) return nullptr;
  const auto& known = active_recorder->described(*name);
  const auto inputs = function.inputs();
  for (const auto place : known.written) {
    if (place >= inputs.size()) continue;
    if (inputs[place].isTensor()) active_recorder->note_write(inputs[place].toTensor(), *name);
    if (!inputs[place].isTensorList()) continue;
    for (const at::Tensor& each : inputs[place].toTensorVector()) active_recorder->note_write(each, *name);
  }
  auto context = std::make_unique<Context>();
  context->is_product = known.is_product;
  active_recorder->products_ += known.is_product ? 1 : 0;
  if (known.repeatable) context->call = active_recorder->begin(*known.repeatable, inputs);
  return context;
}

void PointwiseRecorder::leave(const at::RecordFunction& function, at::ObserverContext* context) {
  if (active_recorder == nullptr || context == nullptr || !static_cast<Context*>(context)->call) return;
  const auto& outputs = function.outputs();
  if (outputs.size() != 1 || !outputs[0].isTensor()) return;
  active_recorder->end(std::move(static_cast<Context*>(context)->call), outputs[0].toTensor());
}

const PointwiseRecorder::Operator& PointwiseRecorder::described(const c10::OperatorName& name) {
  auto [entry, is_new] = operators_.try_emplace(full_name(name));
  auto& known = entry->second;
  if (!is_new) return known;
  static const std::unordered_set<std::string> kProducts{"aten::mm", "aten::addmm", "aten::convolution"};
  known.is_product = kProducts.count(name.name) != 0;
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle) return known;
  const auto& schema = handle->schema();
  bool aliases = false;
  for (std::size_t place = 0; place < schema.arguments().size(); ++place) {
    const auto* alias = schema.arguments()[place].alias_info();
    if (alias == nullptr) continue;
    aliases = true;
    if (alias->isWrite()) known.written.push_back(place);
  }
  const bool is_cheap = handle->hasTag(at::Tag::pointwise) || name.name == "aten::_to_copy";
  const bool is_one_tensor =
      schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::TensorType;
  if (is_cheap && is_one_tensor && !aliases && !handle->hasTag(at::Tag::nondeterministic_seeded)) {
    known.repeatable = *handle;
  }
  return known;
}

int64_t PointwiseRecorder::writes(const c10::StorageImpl* storage) const {
  const auto found = writes_.find(storage);
  return found == writes_.end() ? 0 : found->second.second;
}

void PointwiseRecorder::note_write(const at::Tensor& tensor, const c10::OperatorName& name) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto* storage = storage_key(tensor);
  const auto [entry, is_new] = writes_.try_emplace(storage, tensor.storage().getWeakStorageImpl(), 0);
  ++entry->second.second;
  producers_.erase(storage);
  if (saved_.count(storage) != 0 && writer_.empty()) writer_ = name.name;
}

std::shared_ptr<PointwiseRecorder::Call> PointwiseRecorder::begin(const c10::OperatorHandle& operation,
                                                                  c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.size() != operation.schema().arguments().size()) return nullptr;
  auto call = std::make_shared<Call>(operation);
  for (const auto& input : inputs) {
    if (input.isTensorList() || input.isOptionalTensorList()) return nullptr;
    if (!input.isTensor() || is_number(input.toTensor())) {
      call->arguments.emplace_back(input);
      continue;
    }
    const auto& tensor = input.toTensor();
    if (!is_strided(tensor)) return nullptr;
    call->arguments.emplace_back(
        Argument{tensor.storage().getWeakStorageImpl(), Layout(tensor), writes(storage_key(tensor))});
  }
  return call;
}

void PointwiseRecorder::end(std::shared_ptr<Call> call, const at::Tensor& output) {
  if (!is_strided(output) || static_cast<int64_t>(output.storage().nbytes()) < min_bytes_) return;
  const auto* storage = storage_key(output);
  for (const auto& argument : call->arguments) {
    const auto* tensor = std::get_if<Argument>(&argument);
    if (tensor != nullptr && tensor->storage._unsafe_get_target() == storage) return;
  }
  // Where autocast has cast an argument, the call inside it is known already, which has the argument that it cast.
  producers_.emplace(storage, Producer{output.storage().getWeakStorageImpl(), std::move(call), Layout(output)});
}

std::optional<c10::intrusive_ptr<RecomputedValue>> PointwiseRecorder::recomputed(const Producer& producer) {
  const auto& call = *producer.call;
  const auto bytes = producer.layout.bytes();
  auto moved = bytes;
  for (const auto& argument : call.arguments) {
    if (const auto* tensor = std::get_if<Argument>(&argument)) moved += tensor->layout.bytes();
  }
  if (static_cast<double>(moved) > kMovedForEachByte * static_cast<double>(bytes)) return std::nullopt;
  std::vector<RecomputedValue::Argument> arguments;
  for (const auto& argument : call.arguments) {
    if (const auto* other = std::get_if<c10::IValue>(&argument)) {
      arguments.emplace_back(*other);
      continue;
    }
    const auto& tensor = std::get<Argument>(argument);
    const auto* key = tensor.storage._unsafe_get_target();
    if (writes(key) != tensor.writes) return std::nullopt;
    const auto saved = saved_.find(key);
    if (saved != saved_.end() && saved->second.dropped) {
      auto value = saved->second.dropped->lock();
      if (!value) return std::nullopt;
      arguments.emplace_back(RecomputedValue::Source{tensor.layout, Use(std::move(value))});
      continue;
    }
    auto storage = saved != saved_.end() ? tensor.storage.lock() : nullptr;
    if (!storage) return std::nullopt;
    arguments.emplace_back(RecomputedValue::Source{tensor.layout, c10::Storage(std::move(storage))});
  }
  return c10::make_intrusive<RecomputedValue>(call.operation, std::move(arguments), producer.layout);
}

std::optional<c10::intrusive_ptr<DroppedTensor>> PointwiseRecorder::pack(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto* storage = storage_key(tensor);
  const auto saved = saved_.find(storage);
  if (saved != saved_.end()) {
    auto value = saved->second.dropped ? saved->second.dropped->lock() : nullptr;
    if (!value || !is_strided(tensor)) return std::nullopt;
    return c10::make_intrusive<DroppedTensor>(std::move(value), Layout(tensor));
  }
  const auto producer = producers_.find(storage);
  const bool is_deferred = products_are_deferred_ && products_ > 0;
  if (producer != producers_.end() && is_strided(tensor) && !is_deferred) {
    if (auto value = recomputed(producer->second)) {
      saved_.emplace(storage, Saved{producer->second.storage, c10::weak_intrusive_ptr<RecomputedValue>(*value)});
      dropped_bytes_ += static_cast<int64_t>(tensor.storage().nbytes());
      return c10::make_intrusive<DroppedTensor>(std::move(*value), Layout(tensor));
    }
  }
  saved_.emplace(storage, Saved{tensor.storage().getWeakStorageImpl(), std::nullopt});
  return std::nullopt;
}

namespace {

c10::intrusive_ptr<PointwiseRecorder> make_pointwise_recorder(int64_t min_bytes, bool products_are_deferred) {
  return c10::make_intrusive<PointwiseRecorder>(min_bytes, products_are_deferred);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(smd, m) {
  BoxedClass<DroppedTensor>(m, "DroppedTensor").def<&DroppedTensor::compute>("compute() -> Tensor");
  BoxedClass<PointwiseRecorder>(m, "PointwiseRecorder")
      .init<&make_pointwise_recorder>("int min_bytes, bool products_are_deferred")
      .def<&PointwiseRecorder::start>("start() -> NoneType")
      .def<&PointwiseRecorder::stop>("stop() -> NoneType")
      .def<&PointwiseRecorder::pack>("pack(Tensor tensor) -> __torch__.torch.classes.smd.DroppedTensor?")
      .def<&PointwiseRecorder::writer>("writer() -> str")
      .def<&PointwiseRecorder::dropped_bytes>("dropped_bytes() -> int");
}

}  // namespace smd::torch_ext
