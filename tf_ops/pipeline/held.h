// Objects of this process as elements of variant tensors, which pass them from one operation of a graph to another.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace smd::tf_ops {

template <class T>
struct Held {
  std::shared_ptr<T> value;

  // `Variant` requires these functions. The object never leaves its process, so it is not serialized.
  static std::string TypeName() { return T::kTypeName; }
  static std::string DebugString() { return T::kTypeName; }
  static void Encode(tensorflow::VariantTensorData*) {}
  static bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// TensorFlow copies the elements of a variant tensor between devices. The object itself stays on the host.
template <class T>
absl::Status keep_on_host(const Held<T>& from, Held<T>* to,
                          const tensorflow::UnaryVariantOpRegistry::AsyncTensorDeviceCopyFn&) {
  *to = from;
  return absl::OkStatus();
}

}  // namespace smd::tf_ops

// Registers `Held<T>` for graphs with devices. Use it inside of `smd::tf_ops`.
#define SMD_REGISTER_HELD(T)                                                             \
  INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(                                  \
      Held<T>, tensorflow::VariantDeviceCopyDirection::HOST_TO_DEVICE, keep_on_host<T>); \
  INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(                                  \
      Held<T>, tensorflow::VariantDeviceCopyDirection::DEVICE_TO_HOST, keep_on_host<T>); \
  INTERNAL_REGISTER_UNARY_VARIANT_DEVICE_COPY_FUNCTION(                                  \
      Held<T>, tensorflow::VariantDeviceCopyDirection::DEVICE_TO_DEVICE, keep_on_host<T>)
