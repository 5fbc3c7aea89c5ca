#include "recomputation/recorder.h"

#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <string>
#include <unordered_set>

#include "boxed.h"

namespace smd::torch_ext {

namespace {

// The bytes that an operation may read and write for each byte that is freed: its result and one argument, besides
// small ones such as the weight of a norm.
constexpr double kMovedForEachByte = 2.5;

// The most dropped tensors in a row that are computed from each other. Computing them is a recursion.
constexpr int64_t kMaxDepth = 32;

// The recorder of this thread.
thread_local PointwiseRecorder* active_recorder = nullptr;

bool is_strided(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kOthers({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::ZeroTensor, c10::DispatchKey::Conjugate,
                                         c10::DispatchKey::Negative});
  return tensor.defined() && !tensor.key_set().has_any(kOthers) && !tensor.is_nested() && !tensor.is_quantized() &&
         tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_meta() && !tensor.is_inference();
}

c10::StorageImpl* storage_key(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

bool is_number(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

std::string full_name(const c10::OperatorName& name) { return name.name + "." + name.overload_name; }

}  // namespace

// A running operation.
struct PointwiseRecorder::Context : at::ObserverContext {
  ~Context() override {
    if (active_recorder != nullptr && is_running) active_recorder->running_.pop_back();
  }

  // The call, if it can be repeated.
  std::shared_ptr<Call> call;
  bool is_running = false;
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

// PyTorch does not pass on exceptions of callbacks.
std::unique_ptr<at::ObserverContext> PointwiseRecorder::enter(const at::RecordFunction& function) {
  if (active_recorder == nullptr) return nullptr;
  auto context = std::make_unique<Context>();
  try {
    active_recorder->entered(function, *context);
  } catch (const std::exception& error) {
    active_recorder->obstacle_ = std::string("`") + function.name() + "` could not be observed: " + error.what();
  }
  return context;
}

void PointwiseRecorder::leave(const at::RecordFunction& function, at::ObserverContext* context) {
  if (active_recorder == nullptr || context == nullptr || !static_cast<Context*>(context)->call) return;
  try {
    const auto& outputs = function.outputs();
    if (outputs.size() != 1 || !outputs[0].isTensor()) return;
    active_recorder->end(std::move(static_cast<Context*>(context)->call), outputs[0].toTensor());
  } catch (const std::exception& error) {
    active_recorder->obstacle_ = std::string("`") + function.name() + "` could not be observed: " + error.what();
  }
}

void PointwiseRecorder::entered(const at::RecordFunction& function, Context& context) {
  static const Operator kFunction = [] {
    Operator known;
    known.is_opaque = true;
    return known;
  }();
  const auto name = function.operator_name();
  const auto& known = name ? described(*name) : kFunction;
  const auto inputs = function.inputs();
  for (std::size_t place = 0; known.is_opaque && place < inputs.size(); ++place) {
    note_write(inputs[place], function.name(), Write::kPossible);
  }
  for (const auto place : known.written) note_write(inputs.at(place), function.name(), Write::kTold);
  for (const auto place : known.written_silently) note_write(inputs.at(place), function.name(), Write::kSilent);
  if (known.repeatable && may_repeat(known)) context.call = begin(*known.repeatable, inputs);
  running_.push_back(&known);
  context.is_running = true;
}

bool PointwiseRecorder::may_repeat(const Operator& operation) const {
  // Autocast calls the operator again, with arguments that it has cast.
  return std::all_of(running_.begin(), running_.end(),
                     [&](const Operator* each) { return each->is_composed || each == &operation; });
}

const PointwiseRecorder::Operator& PointwiseRecorder::described(const c10::OperatorName& name) {
  auto [entry, is_new] = operators_.try_emplace(full_name(name));
  auto& known = entry->second;
  if (!is_new) return known;
  static const std::unordered_set<std::string> kProducts{"aten::mm", "aten::addmm", "aten::convolution"};
  known.is_product = kProducts.count(name.name) != 0;
  const auto of = [&](const char* space) { return name.name.rfind(space, 0) == 0; };
  const bool is_own = of("aten::");
  known.is_opaque = !is_own && !of("smd::");
  const auto handle = c10::Dispatcher::singleton().findSchema(name);
  if (!handle) return known;
  const auto& schema = handle->schema();
  bool aliases = false;
  for (std::size_t place = 0; place < schema.arguments().size(); ++place) {
    const auto& argument = schema.arguments()[place];
    const auto* alias = argument.alias_info();
    aliases = aliases || alias != nullptr;
    if ((alias != nullptr && alias->isWrite()) || of("c10d::")) {
      // Schemas of collectives do not say to which tensors they write.
      known.written.push_back(place);
    } else if (argument.name() == "running_mean" || argument.name() == "running_var") {
      // Nor do those of normalizations.
      known.written_silently.push_back(place);
    }
  }
  known.is_composed = is_own && handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  const bool is_cheap = handle->hasTag(at::Tag::pointwise) || name.name == "aten::_to_copy";
  const bool is_one_tensor =
      schema.returns().size() == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::TensorType;
  if (is_own && is_cheap && is_one_tensor && !aliases && !handle->hasTag(at::Tag::nondeterministic_seeded)) {
    known.repeatable = *handle;
  }
  return known;
}

int64_t PointwiseRecorder::writes(const c10::StorageImpl* storage) const {
  const auto found = writes_.find(storage);
  return found == writes_.end() ? 0 : found->second.second;
}

void PointwiseRecorder::note_write(const c10::IValue& value, const std::string& name, Write kind) {
  if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) note_write(each, name, kind);
  }
  if (!value.isTensor()) return;
  const auto& tensor = value.toTensor();
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto* storage = storage_key(tensor);
  const auto [entry, is_new] = writes_.try_emplace(storage, tensor.storage().getWeakStorageImpl(), 0);
  ++entry->second.second;
  producers_.erase(storage);
  const auto saved = saved_.find(storage);
  if (saved == saved_.end() || kind == Write::kPossible || !obstacle_.empty()) return;
  if (kind == Write::kSilent && !saved->second.is_source) return;
  obstacle_ = "`" + name + "` writes to a tensor that the backward needs";
}

std::shared_ptr<PointwiseRecorder::Call> PointwiseRecorder::begin(const c10::OperatorHandle& operation,
                                                                  c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.size() != operation.schema().arguments().size()) return nullptr;
  auto call = std::make_shared<Call>(Call{operation, {}});
  for (const auto& input : inputs) {
    if (input.isTensorList() || input.isOptionalTensorList()) return nullptr;
    if (!input.isTensor() || is_number(input.toTensor())) {
      call->arguments.emplace_back(input);
      continue;
    }
    const auto& tensor = input.toTensor();
    if (!is_strided(tensor)) return nullptr;
    call->arguments.emplace_back(
        Argument{tensor.storage().getWeakStorageImpl(), Layout(tensor), Version(tensor), writes(storage_key(tensor))});
  }
  return call;
}

void PointwiseRecorder::end(std::shared_ptr<Call> call, const at::Tensor& output) {
  if (!is_strided(output) || static_cast<int64_t>(output.storage().nbytes()) < min_bytes_) return;
  const auto* storage = storage_key(output);
  for (const auto& argument : call->arguments) {
    const auto* tensor = std::get_if<Argument>(&argument);
    if (tensor == nullptr) continue;
    if (tensor->storage._unsafe_get_target() == storage || tensor->layout.device != output.device()) return;
  }
  // Under autocast the operator is called twice. The inner call, with the arguments after casts, ends first.
  producers_.emplace(storage,
                     Producer{output.storage().getWeakStorageImpl(), std::move(call), Layout(output), Version(output)});
}

std::optional<c10::intrusive_ptr<RecomputedValue>> PointwiseRecorder::recomputed(const Producer& producer) {
  const auto& call = *producer.call;
  const auto bytes = producer.layout.bytes();
  auto moved = bytes;
  for (const auto& argument : call.arguments) {
    if (const auto* tensor = std::get_if<Argument>(&argument)) moved += tensor->layout.bytes();
  }
  if (static_cast<double>(moved) > kMovedForEachByte * static_cast<double>(bytes)) return std::nullopt;
  int64_t depth = 1;
  std::vector<RecomputedValue::Argument> arguments;
  std::vector<Saved*> sources;
  for (const auto& argument : call.arguments) {
    if (const auto* other = std::get_if<c10::IValue>(&argument)) {
      arguments.emplace_back(*other);
      continue;
    }
    const auto& tensor = std::get<Argument>(argument);
    const auto* key = tensor.storage._unsafe_get_target();
    const auto saved = saved_.find(key);
    if (saved == saved_.end() || writes(key) != tensor.writes || !tensor.version.is_current()) return std::nullopt;
    sources.push_back(&saved->second);
    if (saved->second.dropped) {
      auto value = saved->second.dropped->lock();
      if (!value || value->depth() == kMaxDepth) return std::nullopt;
      depth = std::max(depth, value->depth() + 1);
      arguments.emplace_back(RecomputedValue::Source{tensor.layout, tensor.version, Use(std::move(value))});
    } else {
      auto storage = tensor.storage.lock();
      if (!storage) return std::nullopt;
      arguments.emplace_back(RecomputedValue::Source{tensor.layout, tensor.version, c10::Storage(std::move(storage))});
    }
  }
  for (auto* source : sources) source->is_source = true;
  return c10::make_intrusive<RecomputedValue>(call.operation, std::move(arguments), producer.layout, depth);
}

std::optional<c10::intrusive_ptr<DroppedTensor>> PointwiseRecorder::pack(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto* storage = storage_key(tensor);
  const bool is_product =
      std::any_of(running_.begin(), running_.end(), [](const auto* each) { return each->is_product; });
  const bool must_keep = !is_strided(tensor) || (products_are_deferred_ && is_product);
  const auto saved = saved_.find(storage);
  if (saved != saved_.end()) {
    auto value = saved->second.dropped ? saved->second.dropped->lock() : nullptr;
    if (value && !must_keep) return c10::make_intrusive<DroppedTensor>(std::move(value), Layout(tensor));
    if (value) value->keep(tensor.storage());
    saved->second.dropped.reset();
    return std::nullopt;
  }
  const auto producer = producers_.find(storage);
  if (producer != producers_.end() && producer->second.version.is_current() && !must_keep) {
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
      .def<&PointwiseRecorder::obstacle>("obstacle() -> str")
      .def<&PointwiseRecorder::dropped_bytes>("dropped_bytes() -> int");
}

}  // namespace smd::torch_ext
