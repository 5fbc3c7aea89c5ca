// PyTorch's streams and events. This file uses c10's generic interfaces, which builds without CUDA have as well, so
// that one library serves all builds.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "adapter.h"

namespace smd::torch_ext {

c10::Stream current_stream(c10::Device device);

// The CUDA handle of a stream.
std::size_t handle_of(const c10::Stream& stream);

// The stream for a group's asynchronous operations on a device. It is one of PyTorch's high-priority streams, so
// PyTorch's allocator can track its use.
c10::Stream communication_stream(std::int64_t group, c10::Device device);

// Records in PyTorch's allocator that work queued in `stream` so far uses the memory.
void record_use(const c10::Storage& storage, const c10::Stream& stream);

// Makes a stream current for this thread until the end of the scope.
class StreamScope {
 public:
  explicit StreamScope(const c10::Stream& stream);
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;
  ~StreamScope();

 private:
  c10::Stream before_;
};

// Queues operations on CUDA tensors into the stream that they name; several become one operation. Throws rust::Error.
void queue(const std::vector<TensorOperation>& operations);

// Operations in a communication stream. They begin after the work that was queued before in the current stream. A
// stream that uses their results must wait for them.
//
// The tensors' memory is held until that wait. Afterwards the waiting stream is the next to use it, so the order of
// that stream protects it. If nothing waits, the use in the communication stream is recorded in PyTorch's allocator, so
// that it does not reuse the memory too early.
class PendingWork {
 public:
  // Queues the operations. Throws rust::Error.
  explicit PendingWork(std::vector<TensorOperation> operations);
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;
  ~PendingWork();

  const c10::Stream& stream() const { return stream_; }
  // Makes the current stream wait for the operations. The host does not wait.
  void wait();
  // Whether the device has completed the operations.
  bool is_done() const { return done_.query(); }

 private:
  void let_go(bool used_here_only) noexcept;

  std::vector<TensorOperation> operations_;
  c10::Stream issuer_;
  c10::Stream stream_;
  c10::Event done_;
};

}  // namespace smd::torch_ext
