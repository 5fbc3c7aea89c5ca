// Allocates gradients directly in the memory in which they are reduced.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/device_factory.h"

namespace smd::tf_ops {

// Creates CPU devices whose allocator returns the slot of a gradient where it predicts one. They are TensorFlow's own
// devices in all other respects. Devices that exist before this library is loaded keep their allocator; their gradients
// are copied.
class PlacingDeviceFactory final : public tensorflow::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override;
  absl::Status CreateDevices(const tensorflow::SessionOptions& options, const std::string& name_prefix,
                             std::vector<std::unique_ptr<tensorflow::Device>>* devices) override;
};

}  // namespace smd::tf_ops
