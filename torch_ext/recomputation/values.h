// Values that the backward computes again instead of keeping them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

namespace smd::torch_ext {

// The place of a strided tensor in its storage.
struct Layout {
  explicit Layout(const at::Tensor& tensor);
  // The tensor at this place of `storage`.
  at::Tensor in(c10::Storage storage) const;
  // The bytes of its elements.
  int64_t bytes() const;

  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;
  at::ScalarType dtype;
  c10::Device device;
};

// The number of writes to a tensor that autograd knows of. Unlike a tensor, this keeps no memory.
class Version {
 public:
  explicit Version(const at::Tensor& tensor)
      : counter_(tensor.unsafeGetTensorImpl()->version_counter()), number_(counter_.current_version()) {}
  // Whether no write was counted since.
  bool is_current() const { return counter_.current_version() == number_; }

 private:
  c10::VariableVersion counter_;
  decltype(std::declval<c10::VariableVersion>().current_version()) number_;
};

class RecomputedValue;

// A user of a value that is computed again: a saved tensor, or another such value. The value keeps its result until
// each user has had it or is gone, so it is computed once.
class Use {
 public:
  explicit Use(c10::intrusive_ptr<RecomputedValue> value);
  Use(Use&& other) noexcept;
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;
  Use& operator=(Use&&) = delete;
  ~Use();

  // The storage that holds the value.
  c10::Storage take();

 private:
  c10::intrusive_ptr<RecomputedValue> value_;
  bool is_counted_ = true;
};

// The result of a pointwise operation on tensors that are kept, or computed again themselves.
class RecomputedValue : public c10::intrusive_ptr_target {
 public:
  // A tensor argument.
  struct Source {
    Layout layout;
    Version version;
    std::variant<c10::Storage, Use> storage;
  };
  // An argument: a tensor that is kept or computed again, or anything else, as the operation got it.
  using Argument = std::variant<Source, c10::IValue>;

  // `depth` is the greatest number of operations in a row that `compute` repeats.
  RecomputedValue(c10::OperatorHandle operation, std::vector<Argument> arguments, Layout layout, int64_t depth);

  int64_t depth() const { return depth_; }
  // Keeps the value after all.
  void keep(c10::Storage value);
  // Whether the arguments are as they were in the forward, as far as autograd knows.
  bool is_valid() const;

 private:
  friend class Use;

  c10::Storage compute();

  c10::OperatorHandle operation_;
  std::vector<Argument> arguments_;
  Layout layout_;
  int64_t depth_;
  // Autograd's threads take values. Not held while operations run.
  std::mutex mutex_;
  // Users that have not had the value.
  int64_t waiting_ = 0;
  // The value, while a user waits for it, or if it is kept.
  std::optional<c10::Storage> result_;
  bool is_kept_ = false;
};

// What is packed in place of a saved tensor: a view of a value that is computed again.
class DroppedTensor : public torch::CustomClassHolder {
 public:
  DroppedTensor(c10::intrusive_ptr<RecomputedValue> value, Layout layout);

  // The tensor, with the bits of the one that was saved.
  at::Tensor compute();

 private:
  Use use_;
  Layout layout_;
};

}  // namespace smd::torch_ext
