// A reducer for rounds that is created in the background while the script continues.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reducer.h"
#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// A thread of the core waits for the other ranks; no function of this class does.
class PendingReducer : public torch::CustomClassHolder {
 public:
  // Starts the creation among the global ranks `ranks`, which all have the same vote's `token` (`Ballot`). `order` are
  // indices into `parameters` in the order in which gradients arrived.
  PendingReducer(int64_t token, std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                 const Reducer::Settings& settings, const std::vector<int64_t>& order);

  bool is_done() const { return core_->is_done(); }
  // Returns the reducer after `is_done`. Throws the reason if it could not be created.
  c10::intrusive_ptr<Reducer> take();

 private:
  Reducer::Parameters parameters_;
  Reducer::Settings settings_;
  rust::Box<smd::PendingReducer> core_;
};

}  // namespace smd::torch_ext
