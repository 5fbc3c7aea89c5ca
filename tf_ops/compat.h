// Differences between the versions of TensorFlow that this library is compiled for. The other files do not depend on
// the version.
//
// Each difference is detected by the feature itself, not by a version, so that an unknown newer TensorFlow compiles
// too. Of two overloads, `Preferred` chooses the first one that compiles.
#pragma once

#include <cstddef>

#include "absl/strings/string_view.h"

// The streams of TensorFlow 2.19 want a header of LLVM, which its package leaves out. That is for a class of which
// streams need no more than the name.
#if __has_include("xla/stream_executor/gpu/tma_metadata.h") && !__has_include("llvm/ADT/ArrayRef.h")
#define XLA_STREAM_EXECUTOR_GPU_TMA_METADATA_H_
namespace stream_executor::gpu {
class TmaDescriptor {};
}  // namespace stream_executor::gpu
#endif

#include "xla/stream_executor/stream.h"
#include "xla/stream_executor/stream_executor.h"

namespace smd::tf_ops::compat {

struct Fallback {};
struct Preferred : Fallback {};

// The address of the name of an operation, which is a `const char*` up to TensorFlow 2.19; 0 without a name.
inline std::size_t address_of(absl::string_view name) {
  return name.empty() ? 0 : reinterpret_cast<std::size_t>(name.data());
}
inline std::size_t address_of(const char* name) {
  return name == nullptr || *name == '\0' ? 0 : reinterpret_cast<std::size_t>(name);
}

// Frees memory of an allocator, which can be told its size from TensorFlow 2.18 on.
template <class Allocator>
auto deallocate(Allocator& allocator, void* data, std::size_t alignment, std::size_t bytes, Preferred)
    -> decltype(allocator.DeallocateRaw(data, alignment, bytes)) {
  allocator.DeallocateRaw(data, alignment, bytes);
}
template <class Allocator>
void deallocate(Allocator& allocator, void* data, std::size_t, std::size_t, Fallback) {
  allocator.DeallocateRaw(data);
}

}  // namespace smd::tf_ops::compat
