// Differences between the versions of PyTorch that this library is compiled for. The other files do not depend on the
// version.
//
// Each difference is detected by the feature itself, not by a version, so that an unknown newer PyTorch compiles too.
// Of two overloads, `Preferred` chooses the first one that compiles.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <string>
#include <utility>

namespace smd::torch_ext::compat {

struct Fallback {};
struct Preferred : Fallback {};

// The owning pointer of a node of autograd: std::shared_ptr, from PyTorch 2.13 on c10::intrusive_ptr.
using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// The type that gradients of a tensor get. Before PyTorch 2.10 it is the tensor's own.
template <class Tensor>
auto has_own_grad_dtype(const Tensor& tensor, Preferred) -> decltype(tensor.grad_dtype(), bool()) {
  return tensor.grad_dtype() == tensor.scalar_type();
}
template <class Tensor>
bool has_own_grad_dtype(const Tensor&, Fallback) {
  return true;
}

// The description of a process group in its options, which PyTorch has from 2.11 on.
template <class Options>
auto set_group_desc(Options& options, const std::string& text, Preferred) -> decltype(void(options.group_desc)) {
  options.group_desc = text;
}
template <class Options>
void set_group_desc(Options&, const std::string&, Fallback) {}

// CUDA's handle of a stream from PyTorch before 2.11, whose guards cannot tell it. Here, it is what
// `c10::cuda::CUDAStream::stream` returns; the header of that class needs CUDA's, and the library exists only in CUDA
// builds. device.cc defines it.
std::size_t cuda_stream_handle(const c10::Stream& stream);

// CUDA's handle of a stream.
template <class Guard>
auto native_handle(const Guard& guard, const c10::Stream& stream, Preferred)
    -> decltype(guard.getStreamNativeHandle(stream), std::size_t()) {
  return reinterpret_cast<std::size_t>(guard.getStreamNativeHandle(stream));
}
template <class Guard>
std::size_t native_handle(const Guard&, const c10::Stream& stream, Fallback) {
  return cuda_stream_handle(stream);
}

}  // namespace smd::torch_ext::compat
