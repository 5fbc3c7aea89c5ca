// PyTorch's streams and events, through the interfaces of c10 that builds without CUDA have as well, so that one shim
// serves all builds.
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

// CUDA's handle.
std::size_t handle_of(const c10::Stream& stream);

// Where asynchronous operations of a group on a device run: one of PyTorch's streams of high priority, so that its
// allocator knows it.
c10::Stream communication_stream(std::int64_t group, c10::Device device);

// Tells PyTorch's allocator that what is queued in `stream` so far uses the memory.
void record_use(const c10::Storage& storage, const c10::Stream& stream);

// What this thread does meanwhile goes to another stream.
class StreamScope {
 public:
  explicit StreamScope(const c10::Stream& stream);
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;
  ~StreamScope();

 private:
  c10::Stream before_;
};

// Queues operations on CUDA tensors into the stream that they name, as one if there are several. Throws rust::Error.
void queue(const std::vector<TensorOperation>& operations);

// Operations in a communication stream: they begin when the stream that was current has done what it was given before,
// and whoever wants their results makes a stream wait.
//
// The memory of the tensors is held until then. After that, the stream that waited is where it is used next, as it was
// before; for every other case PyTorch's allocator is told of the communication stream, and does not give the memory
// away early.
class PendingWork {
 public:
  // Throws rust::Error.
  explicit PendingWork(std::vector<TensorOperation> operations);
  PendingWork(const PendingWork&) = delete;
  PendingWork& operator=(const PendingWork&) = delete;
  ~PendingWork();

  const c10::Stream& stream() const { return stream_; }
  // Makes the current stream wait; the host goes on.
  void wait();
  // Whether the device is done.
  bool is_done() const { return done_.query(); }

 private:
  void let_go(bool used_here_only) noexcept;

  std::vector<TensorOperation> operations_;
  c10::Stream issuer_;
  c10::Stream stream_;
  c10::Event done_;
};

}  // namespace smd::torch_ext
