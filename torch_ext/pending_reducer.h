// A reducer for rounds that is made while the script goes on.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "reducer.h"
#include "smd/src/bridge.rs.h"

namespace smd::torch_ext {

// Waits for no other rank: a thread of the core does.
class PendingReducer : public torch::CustomClassHolder {
 public:
  // Among the global ranks `ranks`, which all have the `token` of a vote (`Ballot`). `order` are places in
  // `parameters`, as gradients came.
  PendingReducer(int64_t token, std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                 const Reducer::Settings& settings, const std::vector<int64_t>& order);

  bool is_done() const { return core_->is_done(); }
  // Once it is done. Throws what it could not be made for.
  c10::intrusive_ptr<Reducer> take();

 private:
  Reducer::Parameters parameters_;
  Reducer::Settings settings_;
  rust::Box<smd::PendingReducer> core_;
};

}  // namespace smd::torch_ext
