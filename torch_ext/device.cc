#include "device.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <utility>

#include "compat.h"

namespace smd::torch_ext {
namespace {

c10::impl::VirtualGuardImpl guard(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()); }

}  // namespace

std::size_t compat::cuda_stream_handle(const c10::Stream& stream) {
  // A `CUDAStream` is a `c10::Stream` and nothing else, and a member function takes its object's address first.
  using StreamOf = void* (*)(const c10::Stream*);
  static const auto stream_of = [] {
    void* library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<StreamOf>(dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv"));
  }();
  TORCH_CHECK(stream_of != nullptr,
              "this PyTorch does not provide the CUDA handle of a stream: expected PyTorch 2.9 or newer");
  return reinterpret_cast<std::size_t>(stream_of(&stream));
}

c10::Stream current_stream(c10::Device device) { return guard(device).getStream(device); }

std::size_t handle_of(const c10::Stream& stream) {
  return compat::native_handle(guard(stream.device()), stream, compat::Preferred());
}

// PyTorch's pool has 32 streams for each priority and assigns them in turn. With more groups than that, some share a
// stream. Their operations then run in the order of the host's calls, which must be the same on all ranks, as within
// one group.
c10::Stream communication_stream(std::int64_t group, c10::Device device) {
  static std::mutex mutex;
  static auto* streams = new std::map<std::pair<std::int64_t, c10::DeviceIndex>, c10::Stream>;
  const std::lock_guard lock(mutex);
  const auto key = std::make_pair(group, device.index());
  auto found = streams->find(key);
  if (found == streams->end()) {
    found = streams->emplace(key, guard(device).getStreamFromGlobalPool(device, /*isHighPriority=*/true)).first;
  }
  return found->second;
}

void record_use(const c10::Storage& storage, const c10::Stream& stream) {
  guard(stream.device()).recordDataPtrOnStream(storage.data_ptr(), stream);
}

StreamScope::StreamScope(const c10::Stream& stream) : before_(guard(stream.device()).exchangeStream(stream)) {}

StreamScope::~StreamScope() { guard(before_.device()).exchangeStream(before_); }

void queue(const std::vector<TensorOperation>& operations) {
  if (operations.size() == 1) return operations[0].core.run();
  std::vector<Call> calls;
  calls.reserve(operations.size());
  for (const auto& operation : operations) calls.push_back(operation.core.call());
  run_coalesced({calls.data(), calls.size()});
}

PendingWork::PendingWork(std::vector<TensorOperation> operations)
    : operations_(std::move(operations)),
      issuer_(current_stream(*operations_.at(0).device())),
      stream_(communication_stream(static_cast<std::int64_t>(operations_[0].core.group), issuer_.device())),
      done_(issuer_.device_type()) {
  c10::Event ready(issuer_.device_type());
  ready.record(issuer_);
  ready.block(stream_);
  for (auto& operation : operations_) operation.set_stream(handle_of(stream_));
  try {
    queue(operations_);
    const StreamScope scope(stream_);
    for (const auto& operation : operations_) operation.finish();
    done_.record(stream_);
  } catch (...) {
    // Some of the operations may have been queued.
    let_go(false);
    throw;
  }
}

PendingWork::~PendingWork() { let_go(false); }

void PendingWork::wait() {
  const auto here = current_stream(issuer_.device());
  done_.block(here);
  let_go(here == issuer_);
}

void PendingWork::let_go(bool used_here_only) noexcept {
  if (!used_here_only) {
    for (const auto& operation : operations_) {
      for (const auto& storage : operation.storages()) {
        try {
          record_use(storage, stream_);
        } catch (...) {
          // The device has failed, or the process is ending: nothing will use the memory.
        }
      }
    }
  }
  operations_.clear();
}

}  // namespace smd::torch_ext
