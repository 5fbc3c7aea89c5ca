// Finds saved tensors that the backward can compute again at little cost.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "recomputation/values.h"

namespace smd::torch_ext {

// Observes the operations of a thread during a forward, and tells for each tensor that autograd saves whether it has to
// be kept. `torch.autograd.graph.saved_tensors_hooks` passes on the tensors.
//
// - RECOMPUTE-1: a saved tensor is dropped if it is the result of a pointwise operation (one with PyTorch's tag, or a
//   copy to another type) whose tensor arguments are saved by other nodes of autograd, and if repeating the operation
//   moves little more memory than reading and writing a tensor of that size. An argument may be dropped itself.
// - RECOMPUTE-2: operations that draw random numbers, copy between devices, or whose result shares memory with an
//   argument, are not repeated. Nor are those that run inside another operation, unless PyTorch composes that of
//   operations, or inside a `torch.autograd.Function`: these may write to a result without an operation.
// - RECOMPUTE-3: autograd does not check the versions of tensors that hooks have packed. The recorder therefore detects
//   operations that write to a saved tensor, or to an argument of a dropped tensor. The forward is then captured again
//   without recomputation. Writes that only increase a tensor's version fail the check in `RecomputedValue::compute`.
//   Neither the recorder nor autograd detects a kernel that a module launches outside of operators and functions.
// - RECOMPUTE-4: the inputs of matrix products and convolutions are kept if gradients of weights are computed after the
//   backward (WGT-5): a recomputed one would take memory until then. One that was dropped before is kept, too.
// - RECOMPUTE-5: nothing here keeps memory that autograd would not: storages are held weakly until a tensor is dropped.
class PointwiseRecorder : public torch::CustomClassHolder {
 public:
  // Tensors of fewer bytes than `min_bytes` are kept: another launch would cost more than they do. See RECOMPUTE-4 for
  // `products_are_deferred`.
  PointwiseRecorder(int64_t min_bytes, bool products_are_deferred)
      : min_bytes_(min_bytes), products_are_deferred_(products_are_deferred) {}
  PointwiseRecorder(const PointwiseRecorder&) = delete;
  PointwiseRecorder& operator=(const PointwiseRecorder&) = delete;
  ~PointwiseRecorder() override { stop(); }

  // Begins to observe the calling thread, which must be the one that calls `stop`.
  void start();
  void stop();
  // The object that autograd saves in place of `tensor`; none to keep the tensor.
  std::optional<c10::intrusive_ptr<DroppedTensor>> pack(const at::Tensor& tensor);
  // The reason why the autograd graph of this forward must not be used (RECOMPUTE-3); empty if there is none.
  std::string obstacle() const { return obstacle_; }
  // The bytes of all values that were dropped.
  int64_t dropped_bytes() const { return dropped_bytes_; }

 private:
  // A storage that may be gone. While this exists, its address is not given to another storage.
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  // A tensor argument of an operation.
  struct Argument {
    WeakStorage storage;
    Layout layout;
    Version version;
    // The number of operations that had written to the storage.
    int64_t writes;
  };
  // A call of a pointwise operation.
  struct Call {
    c10::OperatorHandle operation;
    std::vector<std::variant<Argument, c10::IValue>> arguments;
  };
  // The call that returned the tensor in a storage.
  struct Producer {
    WeakStorage storage;
    std::shared_ptr<Call> call;
    Layout layout;
    Version version;
  };
  // A storage that some node of autograd saves.
  struct Saved {
    WeakStorage storage;
    // The value that replaces it, if it was dropped.
    std::optional<c10::weak_intrusive_ptr<RecomputedValue>> dropped;
    // Whether a dropped value is computed from it.
    bool is_source = false;
  };
  // An operator, or any `torch.autograd.Function`.
  struct Operator {
    // The operator, if its results can be computed again (RECOMPUTE-1, RECOMPUTE-2).
    std::optional<c10::OperatorHandle> repeatable;
    // The arguments to which it writes, and those to which it may without saying so.
    std::vector<std::size_t> written;
    std::vector<std::size_t> written_silently;
    // Whether it only calls other operations (RECOMPUTE-2).
    bool is_composed = false;
    // Whether it is a product (RECOMPUTE-4).
    bool is_product = false;
    // Whether it may write to any argument, as `torch.autograd.Function` and operators of other libraries.
    bool is_opaque = false;
  };
  struct Context;

  static std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function);
  static void leave(const at::RecordFunction& function, at::ObserverContext* context);

  void entered(const at::RecordFunction& function, Context& context);
  const Operator& described(const c10::OperatorName& name);
  // A write that a schema tells; one that none tells, which is legal in tensors that are only saved; and one that is
  // possible, but legal only in tensors that are neither saved nor arguments of dropped ones.
  enum class Write { kTold, kSilent, kPossible };
  // Notes a write to the tensors in `value`.
  void note_write(const c10::IValue& value, const std::string& name, Write kind);
  // Whether what runs inside the running operations may be repeated (RECOMPUTE-2).
  bool may_repeat(const Operator& operation) const;
  std::shared_ptr<Call> begin(const c10::OperatorHandle& operation, c10::ArrayRef<const c10::IValue> inputs);
  void end(std::shared_ptr<Call> call, const at::Tensor& output);
  int64_t writes(const c10::StorageImpl* storage) const;
  // The value of `producer` as one that is computed again; none if that costs too much (RECOMPUTE-1).
  std::optional<c10::intrusive_ptr<RecomputedValue>> recomputed(const Producer& producer);

  int64_t min_bytes_;
  bool products_are_deferred_;
  // The running operations; each is called by the one before.
  std::vector<const Operator*> running_;
  std::optional<at::CallbackHandle> handle_;
  std::unordered_map<std::string, Operator> operators_;
  std::unordered_map<const c10::StorageImpl*, Producer> producers_;
  std::unordered_map<const c10::StorageImpl*, Saved> saved_;
  std::unordered_map<const c10::StorageImpl*, std::pair<WeakStorage, int64_t>> writes_;
  std::string obstacle_;
  int64_t dropped_bytes_ = 0;
};

}  // namespace smd::torch_ext
