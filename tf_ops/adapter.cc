#include "adapter.h"

#include "compat.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/platform/logging.h"

namespace smd::tf_ops {
namespace {

// The operations' schemas allow these types only. Types that the core lacks occur in operations that move bytes without
// computing.
DType dtype_of(const tensorflow::Tensor& tensor) {
  switch (tensor.dtype()) {
    case tensorflow::DT_UINT8:
      return DType::UInt8;
    case tensorflow::DT_INT8:
      return DType::Int8;
    case tensorflow::DT_INT16:
    case tensorflow::DT_UINT16:
      return DType::Int16;
    case tensorflow::DT_INT32:
    case tensorflow::DT_UINT32:
      return DType::Int32;
    case tensorflow::DT_INT64:
    case tensorflow::DT_UINT64:
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

std::vector<TensorView> split(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows,
                              const Place& place) {
  std::vector<TensorView> blocks(rows.size(), describe(tensor, place));
  const std::size_t elems = row_elems(tensor.shape());
  const std::size_t elem_bytes = static_cast<std::size_t>(tensorflow::DataTypeSize(tensor.dtype()));
  std::size_t start = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    blocks[i].elems = rows[i] * elems;
    // A tensor without elements has a null pointer, to which nothing may be added.
    if (blocks[i].ptr != nullptr) blocks[i].ptr += start * elem_bytes;
    start += blocks[i].elems;
  }
  return blocks;
}

}  // namespace

Place place_of(tensorflow::OpKernelContext* context) {
  auto* device = context->op_device_context();
  auto* stream = device == nullptr ? nullptr : device->stream();
  if (stream == nullptr) return {};
  // The ordinal of the CUDA platform, which follows CUDA_VISIBLE_DEVICES, and not TensorFlow's virtual device number.
  const auto index = static_cast<std::uint16_t>(stream->parent()->device_ordinal());
  return {DeviceKind::Cuda, index, reinterpret_cast<std::size_t>(stream->platform_specific_handle().stream)};
}

TensorView describe(const tensorflow::Tensor& tensor, const Place& place) {
  TensorView view;
  view.ptr = static_cast<std::uint8_t*>(tensor.data());
  view.elems = static_cast<std::size_t>(tensor.NumElements());
  view.dtype = dtype_of(tensor);
  view.device = place.device;
  view.device_index = place.index;
  view.stream = place.stream;
  return view;
}

TensorOperation::TensorOperation(Collective collective, std::int64_t group, const Place& place) : place_(place) {
  core.collective = collective;
  core.group = static_cast<std::uint64_t>(group);
}

void TensorOperation::write(const tensorflow::Tensor& tensor) {
  kept_.push_back(tensor);
  core.outputs.push_back(describe(tensor, place_));
}

void TensorOperation::read(const tensorflow::Tensor& tensor) {
  kept_.push_back(tensor);
  core.inputs.push_back(describe(tensor, place_));
}

void TensorOperation::write_nothing(const tensorflow::Tensor& like) {
  TensorView nothing = describe(like, place_);
  nothing.elems = 0;
  core.outputs.push_back(nothing);
}

void TensorOperation::write_rows(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows) {
  kept_.push_back(tensor);
  core.outputs = split(tensor, rows, place_);
}

void TensorOperation::read_rows(const tensorflow::Tensor& tensor, const std::vector<std::size_t>& rows) {
  kept_.push_back(tensor);
  core.inputs = split(tensor, rows, place_);
}

std::size_t row_elems(const tensorflow::TensorShape& shape) {
  std::size_t elems = 1;
  for (int i = 1; i < shape.dims(); ++i) elems *= static_cast<std::size_t>(shape.dim_size(i));
  return elems;
}

}  // namespace smd::tf_ops
