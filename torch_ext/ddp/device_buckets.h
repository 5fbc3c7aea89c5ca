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

// The memory layout of a parameter's gradient.
struct GradientLayout {
  at::TensorOptions options;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// The memory of all buckets of a plan, from PyTorch's allocator, and the views of it that become gradients. Large
// gradients are reduced in place, in their own memory.
//
// If the script still holds a view when the parameter's next gradient arrives, the view keeps its values: the bucket
// gets new memory, and the old memory lives as long as the view.
class DeviceBuckets {
 public:
  // `layouts` has one entry for each parameter.
  DeviceBuckets(SharedReducer core, c10::Device device, std::vector<GradientLayout> layouts)
      : core_(std::move(core)), device_(device), layouts_(std::move(layouts)) {}
  DeviceBuckets(const DeviceBuckets&) = delete;
  DeviceBuckets& operator=(const DeviceBuckets&) = delete;
  ~DeviceBuckets();

  // A gradient that is ready, and the stream that produced it.
  struct Gradient {
    at::Tensor value;
    c10::Stream stream;
    // Whether other tensors may share its memory, which must not change then.
    bool shared = false;
  };

  // Packs a bucket's gradients and starts its reduction. `gradients` is indexed by parameter; reduced views replace its
  // entries. Returns the bucket's plan.
  const BucketDescription& reduce(std::size_t index, std::vector<std::optional<Gradient>>& gradients);

  // Makes the current stream wait for all reductions.
  void follow();
  // Ends the step. Records reductions that no stream has waited for in the allocator, because the script may release
  // gradients now.
  void leave() noexcept;

 private:
  struct Bucket {
    BucketDescription plan;
    // Undefined before the first use, and if the bucket has no packed gradients.
    at::Tensor flat;
    // One view for each parameter of the bucket; undefined for gradients that are reduced in place. Each view has a
    // storage of its own, which keeps `flat` alive. Gradients share that storage but are separate tensors, because a
    // tensor that Python has seen counts additional references.
    std::vector<at::Tensor> views;
  };

  // Whether the script holds a view that the next reduction would overwrite.
  static bool is_held(const Bucket& bucket, const std::vector<std::optional<Gradient>>& gradients);
  void allocate(Bucket& bucket) const;
  void let_go(Bucket& bucket) const noexcept;
  // Keeps the allocator from reusing the memory before the queued reductions have ended.
  void protect(const at::Tensor& tensor) const noexcept;

  SharedReducer core_;
  c10::Device device_;
  std::vector<GradientLayout> layouts_;
  std::uint64_t plan_ = 0;
  std::vector<Bucket> buckets_;
  // Gradients that are being reduced in place, and the narrow copies that are reduced instead of others.
  std::vector<Gradient> in_flight_;
};

}  // namespace smd::torch_ext
