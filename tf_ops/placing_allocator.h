// Allocates gradients in the memory in which they are reduced.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tensorflow/core/framework/device_factory.h"

namespace smd::tf_ops {

// Makes CPU devices whose allocator places predicted gradients in their slots, and that are TensorFlow's own in all
// other respects. Devices that exist when this library is loaded stay as they are: then gradients are copied.
class PlacingDeviceFactory final : public tensorflow::DeviceFactory {
 public:
  absl::Status ListPhysicalDevices(std::vector<std::string>* devices) override;
  absl::Status CreateDevices(const tensorflow::SessionOptions& options, const std::string& name_prefix,
                             std::vector<std::unique_ptr<tensorflow::Device>>* devices) override;
};

}  // namespace smd::tf_ops
