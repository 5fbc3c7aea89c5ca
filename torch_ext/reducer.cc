#include "reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "adapter.h"
#include "boxed.h"
#include "ddp/pending_reducer.h"
#include "operations.h"
#include "status.h"

namespace smd::torch_ext {

namespace {

// Tensors of at least this many bytes are broadcast in place; smaller ones are packed.
constexpr std::size_t kPackBytes = 1 << 20;

bool is_packed(const at::Tensor& tensor) {
  return tensor.nbytes() < kPackBytes || !tensor.is_non_overlapping_and_dense();
}

}  // namespace

Reducer::Parameters Reducer::named(std::vector<at::Tensor> tensors, std::vector<std::string> names) {
  TORCH_CHECK_VALUE(tensors.size() == names.size(), "every parameter needs a name");
  Parameters named;
  for (std::size_t i = 0; i < tensors.size(); ++i) named.push_back({std::move(tensors[i]), std::move(names[i])});
  return named;
}

ReducerOptions Reducer::options(const std::vector<int64_t>& bucket_bytes, const Settings& settings,
                                const Parameters& parameters) {
  ReducerOptions options;
  for (const auto bytes : bucket_bytes) options.bucket_bytes.push_back(static_cast<std::size_t>(bytes));
  options.find_unused_parameters = settings.at("find_unused_parameters") != 0;
  options.accumulation_steps = static_cast<std::uint32_t>(settings.at("accumulation_steps"));
  options.static_graph = settings.at("static_graph") != 0;
  options.sum = settings.contains("sum") && settings.at("sum") != 0;
  options.reduction =
      settings.at("comm_hook") >= 0 ? Reduction::ByCaller : static_cast<Reduction>(settings.at("reduction"));
  options.on_device = !parameters.empty() && parameters[0].tensor.is_cuda();
  return options;
}

std::vector<Param> Reducer::describe_all(const Parameters& parameters, const std::vector<int64_t>& delayed) {
  std::vector<Param> described;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [tensor, name, sparse] = parameters[i];
    const auto& first = parameters[0];
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "parameter `", name, "` is not dense but of layout ",
                     tensor.layout());
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.device().is_cpu() || tensor.device().is_cuda(), "parameter `", name, "` is on ",
                                tensor.device(), ": expected the CPU or a CUDA device");
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.device() == first.tensor.device(), "parameter `", name, "` is on ",
                                tensor.device(), " and `", first.name, "` on ", first.tensor.device(),
                                ": expected all of them on one device");
    Param param;
    param.name = name;
    for (const auto size : tensor.sizes()) param.shape.push_back(static_cast<std::uint64_t>(size));
    param.dtype = describe(at::empty({0}, tensor.options())).dtype;
    param.sparse = sparse;
    param.delayed = std::find(delayed.begin(), delayed.end(), static_cast<int64_t>(i)) != delayed.end();
    described.push_back(std::move(param));
  }
  return described;
}

c10::intrusive_ptr<Reducer> Reducer::over(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core,
                                          const Settings& settings) {
  auto reducer = c10::make_intrusive<Reducer>(std::move(parameters), std::move(frozen), std::move(core), settings);
  for (std::size_t i = 0; i < reducer->watched_.size(); ++i) reducer->add_hook(i);
  return reducer;
}

c10::intrusive_ptr<Reducer> Reducer::make(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                                          const std::vector<int64_t>& sparse, const std::vector<int64_t>& delayed,
                                          std::vector<at::Tensor> frozen, std::vector<std::string> frozen_names,
                                          const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                                          const Settings& settings) {
  auto named_parameters = named(std::move(parameters), std::move(names));
  for (const auto place : sparse) named_parameters.at(static_cast<std::size_t>(place)).sparse = true;
  auto named_frozen = named(std::move(frozen), std::move(frozen_names));
  const auto described = describe_all(named_parameters, delayed);
  const std::vector<std::size_t> members(ranks.begin(), ranks.end());
  const auto chosen = options(bucket_bytes, settings, named_parameters);
  auto core = checked(
      [&] { return new_reducer({members.data(), members.size()}, {described.data(), described.size()}, chosen); });
  return over(std::move(named_parameters), std::move(named_frozen), std::move(core), settings);
}

Reducer::Reducer(Parameters parameters, Parameters frozen, rust::Box<smd::Reducer> core, const Settings& settings)
    : frozen_(std::move(frozen)),
      core_(std::make_shared<rust::Box<smd::Reducer>>(std::move(core))),
      comm_hook_(settings.at("comm_hook")),
      static_graph_(settings.at("static_graph") != 0),
      may_leave_unused_(settings.at("find_unused_parameters") != 0 && !static_graph_),
      has_rounds_(settings.contains("rounds") && settings.at("rounds") != 0),
      expected_(parameters.size()) {
  for (auto& parameter : parameters) {
    has_sparse_ |= parameter.sparse;
    WatchedParameter watched;
    watched.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    watched.hook = 0;
    watched.options = parameter.tensor.options().requires_grad(false);
    watched.sizes = parameter.tensor.sizes().vec();
    // The same rule as autograd's for the layout of gradients.
    watched.strides = parameter.tensor.is_non_overlapping_and_dense()
                          ? parameter.tensor.strides().vec()
                          : c10::IntArrayRef(c10::contiguous_strides(parameter.tensor.sizes())).vec();
    watched.parameter = std::move(parameter);
    watched_.push_back(std::move(watched));
  }
  if (watched_.empty() || !watched_[0].options.device().is_cuda()) return;
  std::vector<GradientLayout> layouts;
  for (const auto& watched : watched_) layouts.push_back({watched.options, watched.sizes, watched.strides});
  device_buckets_ = std::make_unique<DeviceBuckets>(core_, watched_[0].options.device(), std::move(layouts));
}

Reducer::~Reducer() {
  // The script may release the gradients after this.
  if (has_rounds_ && mode_ == Mode::Reduced) leave(false);
  remove_hooks();
}

void Reducer::remove_hooks() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(has_hooks_, false)) return;
  for (auto& watched : watched_) {
    watched.accumulator->del_post_hook(watched.hook);
    // Autograd then creates an accumulator in each forward, on the stream of that forward. CUDA graphs need this.
    watched.accumulator = nullptr;
  }
}

void Reducer::configure(const std::vector<int64_t>& bucket_bytes, const Settings& settings) {
  const std::lock_guard lock(mutex_);
  auto chosen = options(bucket_bytes, settings, {});
  chosen.on_device = device_buckets_ != nullptr;
  checked([&] { (*core_)->configure(chosen); });
  comm_hook_ = settings.at("comm_hook");
  static_graph_ = settings.at("static_graph") != 0;
  may_leave_unused_ = settings.at("find_unused_parameters") != 0 && !static_graph_;
}

void Reducer::await_step() {
  checked([&] { (*core_)->await_step(); });
}

int64_t Reducer::group() const { return static_cast<int64_t>((*core_)->group()); }

std::string Reducer::describe_plan() const { return std::string((*core_)->describe_plan()); }

std::vector<std::vector<int64_t>> Reducer::buckets() const {
  std::vector<std::vector<int64_t>> buckets;
  const auto count = watched_.empty() ? 0 : (*core_)->num_buckets();
  for (std::size_t index = 0; index < count; ++index) {
    const auto bucket = (*core_)->bucket(index);
    buckets.emplace_back(bucket.params.begin(), bucket.params.end());
  }
  return buckets;
}

c10::Dict<std::string, int64_t> Reducer::statistics() {
  const std::lock_guard lock(mutex_);
  const auto record = (*core_)->record();
  auto statistics = times_.sampled();
  statistics.insert("has_rebuilt_buckets", static_cast<int64_t>(record.rebuilt));
  statistics.insert("unused_parameter_size", static_cast<int64_t>(record.unused_bytes));
  return statistics;
}

std::vector<int64_t> Reducer::last_order() const {
  const auto order = (*core_)->record().order;
  return {order.begin(), order.end()};
}

void Reducer::set_sample_rate(int64_t rate) {
  const std::lock_guard lock(mutex_);
  times_.set_sample_rate(rate);
}

void Reducer::broadcast(const std::vector<at::Tensor>& tensors, int64_t root) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  checked([&] { (*core_)->await_step(); });
  const auto send = [&](const at::Tensor& dense) { checked([&] { run(broadcast_(dense, root, group())); }); };
  // On devices, all broadcasts are one operation.
  std::vector<TensorOperation> on_device;
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda()) on_device.push_back(broadcast_(tensor, root, group()));
  }
  if (!on_device.empty()) checked([&] { queue(on_device); });
  for (const auto& operation : on_device) operation.finish();
  std::size_t packed_bytes = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.is_cuda() && is_packed(tensor)) packed_bytes += tensor.nbytes();
  }
  auto packed = at::empty({static_cast<int64_t>(packed_bytes)}, at::kByte);
  auto* next = packed.data_ptr<std::uint8_t>();
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda() || !is_packed(tensor)) continue;
    const auto dense = tensor.contiguous();
    if (dense.nbytes() > 0) std::memcpy(next, dense.const_data_ptr(), dense.nbytes());
    next += dense.nbytes();
  }
  if (packed_bytes > 0) send(packed);
  next = packed.data_ptr<std::uint8_t>();
  for (const auto& tensor : tensors) {
    if (tensor.is_cuda()) continue;
    if (!is_packed(tensor)) {
      // Dense memory in any dimension order, which is the same on all ranks, is sent as a flat tensor.
      send(tensor.as_strided({tensor.numel()}, {1}));
    } else {
      tensor.copy_(at::from_blob(next, tensor.sizes(), tensor.options().requires_grad(false)));
      next += tensor.nbytes();
    }
  }
}

namespace {

c10::intrusive_ptr<PendingReducer> make_pending_reducer(int64_t token, std::vector<at::Tensor> parameters,
                                                        std::vector<std::string> names,
                                                        const std::vector<int64_t>& ranks,
                                                        const std::vector<int64_t>& bucket_bytes,
                                                        const Reducer::Settings& settings,
                                                        const std::vector<int64_t>& order) {
  return c10::make_intrusive<PendingReducer>(token, std::move(parameters), std::move(names), ranks, bucket_bytes,
                                             settings, order);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(smd, m) {
  BoxedClass<Reducer>(m, "Reducer")
      .init<&Reducer::make>(
          "Tensor[] parameters, str[] names, int[] sparse, int[] delayed, Tensor[] frozen, str[] frozen_names, "
          "int[] ranks, int[] bucket_bytes, Dict(str, int) settings")
      .def<&Reducer::configure>("configure(int[] bucket_bytes, Dict(str, int) settings) -> NoneType")
      .def<&Reducer::group>("group() -> int")
      .def<&Reducer::await_step>("await_step() -> NoneType")
      .def<&Reducer::sync_buffers>("sync_buffers(Tensor[] buffers, bool sync) -> NoneType")
      .def<&Reducer::watch>("watch(Tensor[] outputs, bool sync, int started) -> NoneType")
      .def<&Reducer::expect_sync>("expect_sync() -> NoneType")
      .def<&Reducer::remove_hooks>("remove_hooks() -> NoneType")
      .def<&Reducer::shadow>("shadow() -> NoneType")
      .def<&Reducer::scale_next>("scale_next(Tensor? factor) -> NoneType")
      .def<&Reducer::open>("open() -> NoneType")
      .def<&Reducer::open_by_vote>(
          "open_by_vote(int process_set, str name, str what) -> __torch__.torch.classes.smd.Ballot")
      .def<&Reducer::expect>("expect(int[] accumulations) -> NoneType")
      .def<&Reducer::ready>("ready(int[] indices) -> NoneType")
      .def<&Reducer::missing>("missing() -> int[]")
      .def<&Reducer::close>("close() -> NoneType")
      .def<&Reducer::cancel>("cancel() -> NoneType")
      .def<&Reducer::await_device>("await_device() -> NoneType")
      .def<&Reducer::fits>("fits() -> bool")
      .def<&Reducer::broadcast>("broadcast(Tensor[] tensors, int root) -> NoneType")
      .def<&Reducer::describe_plan>("describe_plan() -> str")
      .def<&Reducer::buckets>("buckets() -> int[][]")
      .def<&Reducer::statistics>("statistics() -> Dict(str, int)")
      .def<&Reducer::last_order>("last_order() -> int[]")
      .def<&Reducer::set_sample_rate>("set_sample_rate(int rate) -> NoneType");
  // Registered here, because it returns reducers and PyTorch requires a class to be registered before it is mentioned.
  BoxedClass<PendingReducer>(m, "PendingReducer")
      .init<&make_pending_reducer>(
          "int token, Tensor[] parameters, str[] names, int[] ranks, int[] bucket_bytes, Dict(str, int) settings, "
          "int[] order")
      .def<&PendingReducer::is_done>("is_done() -> bool")
      .def<&PendingReducer::take>("take() -> __torch__.torch.classes.smd.Reducer");
}

}  // namespace smd::torch_ext
