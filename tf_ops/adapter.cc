#include "adapter.h"

#include "status.h"

namespace smd::tf_ops {
namespace {

// The ops' schemas admit these types only.
DType dtype_of(const tensorflow::Tensor& tensor) {
  switch (tensor.dtype()) {
    case tensorflow::DT_UINT8:
      return DType::UInt8;
    case tensorflow::DT_INT8:
      return DType::Int8;
    case tensorflow::DT_INT16:
      return DType::Int16;
    case tensorflow::DT_INT32:
      return DType::Int32;
    case tensorflow::DT_INT64:
      return DType::Int64;
    case tensorflow::DT_HALF:
      return DType::Float16;
    case tensorflow::DT_BFLOAT16:
      return DType::BFloat16;
    case tensorflow::DT_FLOAT:
      return DType::Float32;
    case tensorflow::DT_DOUBLE:
      return DType::Float64;
    case tensorflow::DT_BOOL:
      return DType::Bool;
    case tensorflow::DT_COMPLEX64:
      return DType::Complex64;
    case tensorflow::DT_COMPLEX128:
      return DType::Complex128;
    default:
      LOG(FATAL) << "an op's schema admits " << tensorflow::DataTypeString(tensor.dtype())
                 << ", which the core does not have";
  }
}

TensorView describe(const tensorflow::Tensor& tensor) {
  TensorView view;
  // The core writes to outputs only.
  view.ptr = static_cast<std::uint8_t*>(tensor.data());
  view.elems = static_cast<std::size_t>(tensor.NumElements());
  view.dtype = dtype_of(tensor);
  view.device = DeviceKind::Cpu;
  view.device_index = 0;
  view.stream = 0;
  return view;
}

}  // namespace

TensorOperation::TensorOperation(Collective collective, std::int64_t group) {
  core.collective = collective;
  core.group = static_cast<std::uint64_t>(group);
}

void TensorOperation::write(const tensorflow::Tensor& tensor) {
  kept_.push_back(tensor);
  core.outputs.push_back(describe(tensor));
}

void TensorOperation::read(const tensorflow::Tensor& tensor) {
  kept_.push_back(tensor);
  core.inputs.push_back(describe(tensor));
}

void TensorOperation::write_rows(const tensorflow::Tensor& tensor, std::size_t parts) {
  kept_.push_back(tensor);
  core.outputs.assign(parts, describe(tensor));
  const std::size_t part_bytes = tensor.TotalBytes() / parts;
  for (std::size_t i = 0; i < parts; ++i) {
    core.outputs[i].elems /= parts;
    if (core.outputs[i].ptr != nullptr) core.outputs[i].ptr += i * part_bytes;
  }
}

}  // namespace smd::tf_ops
