// Buckets of gradients on a CUDA device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "placing_allocator.h"
#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// How the gradient of a parameter lies in memory.
struct GradientLayout {
  at::TensorOptions options;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// The memory of all buckets of a plan, PyTorch's own, and views of it that become gradients. Large gradients are
// reduced where they lie and stay what they are.
//
// A view that the script still holds when the next gradient of its parameter comes keeps its values: the bucket gets
// new memory, and the old lives on with the views that are held.
class DeviceBuckets {
 public:
  // Layouts by parameter.
  DeviceBuckets(SharedReducer core, c10::Device device, std::vector<GradientLayout> layouts)
      : core_(std::move(core)), device_(device), layouts_(std::move(layouts)) {}
  DeviceBuckets(const DeviceBuckets&) = delete;
  DeviceBuckets& operator=(const DeviceBuckets&) = delete;
  ~DeviceBuckets();

  // A gradient that is ready, and the stream in which it was made.
  struct Gradient {
    at::Tensor value;
    c10::Stream stream;
    // Whether other tensors, which are not to change, may lie in its memory.
    bool shared = false;
  };

  // Packs and reduces a bucket from gradients by parameter. Returns its plan; what becomes of the gradients is in their
  // place.
  const BucketDescription& reduce(std::size_t index, std::vector<std::optional<Gradient>>& gradients);

  // Makes the current stream wait for what was reduced.
  void follow();
  // Gradients may go; what was reduced since the last time is perhaps not followed.
  void leave() noexcept;

 private:
  struct Bucket {
    BucketDescription plan;
    // Undefined before its first use, and where no slot takes room.
    at::Tensor flat;
    // One for each parameter of the plan, each with a storage of its own that keeps `flat` alive; undefined for those
    // that are set apart. Gradients share the storage, but are tensors of their own: what Python has seen counts more
    // references than there are.
    std::vector<at::Tensor> views;
  };

  // Whether a tensor of somebody else's refers to a view that would be overwritten.
  static bool is_held(const Bucket& bucket, const std::vector<std::optional<Gradient>>& gradients);
  void allocate(Bucket& bucket) const;
  void let_go(Bucket& bucket) const noexcept;
  // The memory is not used again before what is queued is reduced.
  void protect(const at::Tensor& tensor) const noexcept;

  SharedReducer core_;
  c10::Device device_;
  std::vector<GradientLayout> layouts_;
  std::uint64_t plan_ = 0;
  std::vector<Bucket> buckets_;
  // Gradients that are being reduced where they lie, and what others are cast to.
  std::vector<Gradient> in_flight_;
};

}  // namespace smd::torch_ext
