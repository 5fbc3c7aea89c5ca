#include "placing_allocator.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "compat.h"
#include "smd/placed_slots.h"
#include "smd/src/bridge.rs.h"
#include "tensorflow/core/common_runtime/process_state.h"
#include "tensorflow/core/common_runtime/threadpool_device.h"
#include "tensorflow/core/framework/allocator.h"
#include "tensorflow/core/platform/numa.h"
#include "tensorflow/core/public/session_options.h"
#include "tsl/profiler/lib/scoped_memory_debug_annotation.h"

namespace smd::tf_ops {
namespace {

// Higher than the priorities of TensorFlow's own device factories: 60, and 70 in GPU builds.
constexpr int kPriority = 75;

// TensorFlow's CPU allocator, except that an allocation which is predicted to become a gradient gets that gradient's
// slot. Such a tensor is valid whatever it becomes. The slot is in use until its last reference is gone; if another
// tensor becomes the gradient, that one is copied to the slot.
//
// This saves one pass over all gradients in each step (docs/performance.md).
class PlacingAllocator final : public tsl::AllocatorWrapper {
 public:
  using AllocatorWrapper::AllocatorWrapper;

  // Returns the allocator over `base`. There is one for each of TensorFlow's allocators, and they live as long as the
  // process, as TensorFlow's do.
  static PlacingAllocator* over(tsl::Allocator* base) {
    static auto* mutex = new std::mutex;
    static auto* made = new std::unordered_map<tsl::Allocator*, PlacingAllocator*>;
    const std::lock_guard lock(*mutex);
    auto& allocator = (*made)[base];
    if (allocator == nullptr) allocator = new PlacingAllocator(base);
    return allocator;
  }

  void* AllocateRaw(std::size_t alignment, std::size_t num_bytes) override {
    return AllocateRaw(alignment, num_bytes, tsl::AllocationAttributes());
  }

  void* AllocateRaw(std::size_t alignment, std::size_t num_bytes,
                    const tsl::AllocationAttributes& attributes) override {
    const auto op = num_bytes < kMinPlacedBytes || alignment > kAllocatorAlignment ? 0 : current_operation();
    if (op == 0) return wrapped()->AllocateRaw(alignment, num_bytes, attributes);
    if (void* slot = slots_.keep(place_for_op(num_bytes, op))) return slot;
    void* data = wrapped()->AllocateRaw(alignment, num_bytes, attributes);
    placed_elsewhere_for_op(num_bytes, op, static_cast<const std::uint8_t*>(data));
    return data;
  }

  void DeallocateRaw(void* data) override {
    if (!slots_.release(data)) wrapped()->DeallocateRaw(data);
  }

  // Not marked `override`: TensorFlow 2.17 and older do not call it.
  virtual void DeallocateRaw(void* data, std::size_t alignment, std::size_t num_bytes) {
    if (!slots_.release(data)) compat::deallocate(*wrapped(), data, alignment, num_bytes, compat::Preferred());
  }

  // TensorFlow's allocator does not know the slots, so it cannot report their sizes; tracking sizes is optional.
  bool TracksAllocationSizes() const override { return false; }
  std::size_t AllocatedSizeSlow(const void* data) const override {
    return slots_.has(data) ? 0 : wrapped()->AllocatedSizeSlow(data);
  }

  std::optional<tsl::AllocatorStats> GetStats() override { return wrapped()->GetStats(); }
  bool ClearStats() override { return wrapped()->ClearStats(); }

 private:
  // Identifies the kernel that runs on this thread by the address of its operation's name, which the kernel owns.
  // Returns 0 outside of kernels.
  static std::size_t current_operation() {
    return compat::address_of(tsl::profiler::ScopedMemoryDebugAnnotation::CurrentAnnotation().pending_op_name);
  }

  PlacedSlots slots_;
};

// Where TensorFlow has GPUs, its GPU-aware CPU devices stay, whose host memory GPUs can access. Gradients on the CPU
// are not placed then.
bool registered = [] {
  const bool gpus = access("/proc/driver/nvidia/version", F_OK) == 0 || access("/dev/kfd", F_OK) == 0;
  if (!gpus) {
    tensorflow::DeviceFactory::Register("CPU", std::make_unique<PlacingDeviceFactory>(), kPriority,
                                        /*is_pluggable_device=*/false);
  }
  return !gpus;
}();

}  // namespace

absl::Status PlacingDeviceFactory::ListPhysicalDevices(std::vector<std::string>* devices) {
  devices->push_back("/physical_device:CPU:0");
  return absl::OkStatus();
}

absl::Status PlacingDeviceFactory::CreateDevices(const tensorflow::SessionOptions& options,
                                                 const std::string& name_prefix,
                                                 std::vector<std::unique_ptr<tensorflow::Device>>* devices) {
  const auto& counts = options.config.device_count();
  const auto given = counts.find("CPU");
  const int count = given == counts.end() ? 1 : given->second;
  for (int i = 0; i < count; ++i) {
    int node = tensorflow::port::kNUMANoAffinity;
    tensorflow::DeviceLocality locality;
    if (options.config.experimental().use_numa_affinity()) {
      node = i % tensorflow::port::NUMANumNodes();
      locality.set_numa_node(node);
    }
    // TensorFlow's default memory limit, which is informational for CPU devices.
    devices->push_back(std::make_unique<tensorflow::ThreadPoolDevice>(
        options, absl::StrCat(name_prefix, "/device:CPU:", i), tensorflow::Bytes(256 << 20), locality,
        PlacingAllocator::over(tensorflow::ProcessState::singleton()->GetCPUAllocator(node))));
  }
  return absl::OkStatus();
}

}  // namespace smd::tf_ops
