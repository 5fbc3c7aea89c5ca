#include "adapter.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "device.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::UInt8;
    case at::kChar:
      return DType::Int8;
    case at::kShort:
      return DType::Int16;
    case at::kInt:
      return DType::Int32;
    case at::kLong:
      return DType::Int64;
    case at::kHalf:
      return DType::Float16;
    case at::kBFloat16:
      return DType::BFloat16;
    case at::kFloat:
      return DType::Float32;
    case at::kDouble:
      return DType::Float64;
    case at::kBool:
      return DType::Bool;
    case at::kComplexFloat:
      return DType::Complex64;
    case at::kComplexDouble:
      return DType::Complex128;
    default:
      TORCH_CHECK_TYPE(false, "a tensor of type ", tensor.scalar_type(),
                       " cannot be sent: expected an 8 to 64 bit integer, a float of 16 to 64 bits, bool or complex");
  }
}

DeviceKind device_kind_of(const at::Tensor& tensor) {
  switch (tensor.device().type()) {
    case at::kCPU:
      return DeviceKind::Cpu;
    case at::kCUDA:
      return DeviceKind::Cuda;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "a tensor on ", tensor.device(),
                                  " cannot be sent: expected a CPU or CUDA tensor");
  }
}

const char* begin(const at::Tensor& dense) { return static_cast<const char*>(dense.const_data_ptr()); }

// Whether the memory holds `tensor`'s elements in order. A conjugate or negative view is lazy: its memory holds other
// values.
bool is_dense(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "a tensor of layout ", tensor.layout(),
                   " cannot be sent: make it dense first (`tensor.to_dense()`)");
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Whether the tensors must form one contiguous block. The answer depends only on sizes, which all ranks know: on a
// device it determines how blocks travel, and ranks do not know each other's addresses.
bool make_a_row(at::TensorList tensors) {
  if (tensors.size() < 2 || !tensors[0].is_cuda()) return false;
  const auto like = [&](const at::Tensor& tensor) {
    return tensor.is_cuda() && tensor.numel() == tensors[0].numel() && tensor.scalar_type() == tensors[0].scalar_type();
  };
  return std::all_of(tensors.begin(), tensors.end(), like);
}

// Whether each tensor begins where the one before it ends.
bool are_adjacent(at::TensorList tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!is_dense(tensors[i])) return false;
    if (i > 0 && begin(tensors[i]) != begin(tensors[i - 1]) + tensors[i - 1].nbytes()) return false;
  }
  return true;
}

// Smaller copies take little time, compared with the operation.
constexpr std::size_t kLargeBytes = 1 << 20;

// Counts the copy of a large tensor, and warns once. Parameters that are broadcast once are not worth a warning.
void note_copy(const at::Tensor& tensor, Collective collective, const char* why) {
  if (tensor.nbytes() < kLargeBytes) return;
  note_fallback("copied_tensor");
  if (collective == Collective::Broadcast) return;
  TORCH_WARN_ONCE("a collective copies a tensor of shape ", tensor.sizes(), " and strides ", tensor.strides(), ": ",
                  why, ". This takes memory and time; further copies are counted as `copied_tensor` in the metrics");
}

}  // namespace

TensorView describe(const at::Tensor& dense) {
  TensorView view;
  view.ptr = static_cast<std::uint8_t*>(const_cast<void*>(dense.const_data_ptr()));
  view.elems = static_cast<std::size_t>(dense.numel());
  view.dtype = dtype_of(dense);
  view.device = device_kind_of(dense);
  view.device_index = view.device == DeviceKind::Cuda ? static_cast<std::uint16_t>(dense.device().index()) : 0;
  view.stream = view.device == DeviceKind::Cuda ? handle_of(current_stream(dense.device())) : 0;
  return view;
}

TensorOperation::TensorOperation(Collective collective, int64_t group) {
  core.collective = collective;
  core.group = static_cast<std::uint64_t>(group);
}

void TensorOperation::write(const at::Tensor& tensor) { core.outputs.push_back(describe(dense_output(tensor))); }

void TensorOperation::read(const at::Tensor& tensor) { core.inputs.push_back(describe(dense_input(tensor))); }

void TensorOperation::read_own_block(const at::Tensor& tensor) {
  const auto is_own = [&](const TensorView& own) {
    return static_cast<const void*>(own.ptr) == tensor.const_data_ptr() && own.dtype == dtype_of(tensor) &&
           own.elems == static_cast<std::size_t>(tensor.numel());
  };
  const std::size_t rank = group_rank(core.group);
  // The core explains a wrong number of outputs.
  if (rank >= core.outputs.size() || !is_dense(tensor) || !is_own(core.outputs[rank])) return read(tensor);
  kept_.push_back(tensor.storage());
  core.inputs.push_back(describe(tensor));
}

void TensorOperation::write_blocks(at::TensorList tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!make_a_row(tensors) || are_adjacent(tensors)) {
    for (const auto& tensor : tensors) write(tensor);
    return;
  }
  const auto elems = tensors[0].numel();
  const auto row = at::empty({static_cast<int64_t>(tensors.size()) * elems}, tensors[0].options());
  kept_.push_back(row.storage());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto& tensor = tensors[i];
    at::assert_no_internal_overlap(tensor);
    const auto block = row.narrow(0, static_cast<int64_t>(i) * elems, elems);
    copies_.emplace_back(at::alias(tensor), block.view(tensor.sizes()));
    kept_.push_back(tensor.storage());
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    core.outputs.push_back(describe(block));
  }
}

void TensorOperation::read_blocks(at::TensorList tensors) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  // `read` copies an input that shares memory with an output. The copy is not adjacent to the other inputs.
  const auto is_written = [&](const at::Tensor& tensor) { return overlaps_output(tensor); };
  if (!make_a_row(tensors) || (are_adjacent(tensors) && std::none_of(tensors.begin(), tensors.end(), is_written))) {
    for (const auto& tensor : tensors) read(tensor);
    return;
  }
  std::vector<at::Tensor> rows;
  for (const auto& tensor : tensors) rows.push_back(tensor.reshape({-1}));
  const auto row = at::cat(rows);
  kept_.push_back(row.storage());
  const auto elems = tensors[0].numel();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    core.inputs.push_back(describe(row.narrow(0, static_cast<int64_t>(i) * elems, elems)));
  }
}

void TensorOperation::update(const at::Tensor& tensor) {
  const auto dense = dense_output(tensor);
  if (!dense.is_same(tensor)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    dense.copy_(tensor);
  }
  core.outputs.push_back(describe(dense));
  core.inputs.push_back(core.outputs.back());
}

void TensorOperation::write_nothing(const at::Tensor& like) {
  TensorView nothing = describe(like);
  nothing.ptr = nullptr;
  nothing.elems = 0;
  core.outputs.push_back(nothing);
}

void TensorOperation::write_rows(const at::Tensor& tensor, at::IntArrayRef rows) {
  core.outputs = split(dense_output(tensor), rows, "output");
}

void TensorOperation::read_rows(const at::Tensor& tensor, at::IntArrayRef rows) {
  core.inputs = split(dense_input(tensor), rows, "input");
}

void TensorOperation::finish() const {
  if (copies_.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [tensor, dense] : copies_) tensor.copy_(dense);
}

std::optional<c10::Device> TensorOperation::device() const {
  for (const auto* views : {&core.outputs, &core.inputs}) {
    for (const auto& view : *views) {
      if (view.device == DeviceKind::Cuda)
        return c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(view.device_index));
    }
  }
  return std::nullopt;
}

void TensorOperation::set_stream(std::size_t handle) {
  for (auto& view : core.outputs) view.stream = handle;
  for (auto& view : core.inputs) view.stream = handle;
}

at::Tensor TensorOperation::dense_output(const at::Tensor& tensor) {
  at::Tensor dense = tensor;
  if (!is_dense(tensor)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    // Rejects expanded tensors, where several elements share one address.
    at::assert_no_internal_overlap(tensor);
    note_copy(tensor, core.collective, "its elements are not in row-major order");
    dense = at::empty(tensor.sizes(), tensor.options());
    // Holds an alias, because the user's tensor belongs to Python.
    copies_.emplace_back(at::alias(tensor), dense);
    kept_.push_back(tensor.storage());
  }
  // Autograd must notice that the values have changed. Inference tensors have no version counter.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  written_.emplace_back(begin(dense), begin(dense) + dense.nbytes());
  kept_.push_back(dense.storage());
  return dense;
}

bool TensorOperation::overlaps_output(const at::Tensor& dense) const {
  return std::any_of(written_.begin(), written_.end(), [&](const auto& output) {
    return begin(dense) < output.second && output.first < begin(dense) + dense.nbytes();
  });
}

at::Tensor TensorOperation::dense_input(const at::Tensor& tensor) {
  at::Tensor dense = tensor;
  if (!is_dense(tensor)) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    note_copy(tensor, core.collective, "its elements are not in row-major order");
    dense = tensor.resolve_conj().resolve_neg().contiguous();
  } else {
    if (overlaps_output(tensor)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      note_copy(tensor, core.collective, "it shares memory with an output of the collective");
      dense = tensor.clone();
    }
  }
  kept_.push_back(dense.storage());
  return dense;
}

std::vector<TensorView> TensorOperation::split(const at::Tensor& dense, at::IntArrayRef rows, const char* what) const {
  const int64_t parts = static_cast<int64_t>(group_size(core.group));
  TORCH_CHECK_VALUE(dense.dim() > 0, "the ", what, " has no dimension 0 to split into ", parts, " parts");
  // SyncBatchNorm's tensors have a leading dimension of size 1.
  int64_t first = 0;
  while (rows.empty() && first + 1 < dense.dim() && dense.size(first) == 1) ++first;
  const int64_t height = dense.size(first);
  if (rows.empty()) {
    TORCH_CHECK_VALUE(height % parts == 0, "dimension ", first, " of the ", what, ", of size ", height,
                      ", cannot be split into equal parts for ", parts, " ranks");
  } else {
    int64_t sum = 0;
    for (const int64_t size : rows) {
      TORCH_CHECK_VALUE(size >= 0, "split sizes of the ", what, " must not be negative: ", rows);
      sum += size;
    }
    TORCH_CHECK_VALUE(static_cast<int64_t>(rows.size()) == parts && sum == height, "split sizes ", rows, " of the ",
                      what, " do not fit: expected ", parts, " sizes that sum to ", height);
  }
  const int64_t row_elems = height == 0 ? 0 : dense.numel() / height;
  const std::size_t row_bytes = static_cast<std::size_t>(row_elems) * dense.element_size();
  std::vector<TensorView> blocks(static_cast<std::size_t>(parts), describe(dense));
  std::uint8_t* next = blocks[0].ptr;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const int64_t size = rows.empty() ? height / parts : rows[i];
    blocks[i].ptr = next;
    blocks[i].elems = static_cast<std::size_t>(size * row_elems);
    if (next != nullptr) next += static_cast<std::size_t>(size) * row_bytes;
  }
  return blocks;
}

}  // namespace smd::torch_ext
