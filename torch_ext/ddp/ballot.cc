#include "ddp/ballot.h"

#include <torch/library.h>

#include <string>
#include <vector>

#include "status.h"

namespace smd::torch_ext {

int64_t Ballot::result() const {
  return static_cast<int64_t>(checked([&] { return core_->result(); }));
}

int64_t Ballot::result_so_far() const { return core_->is_decided() ? result() : -1; }

TORCH_LIBRARY_FRAGMENT(smd, m) {
  // The global ranks of a process set, in the form in which reducers take them.
  m.def("process_set_members(int process_set) -> int[]", [](int64_t process_set) {
    const auto ranks = checked([&] { return group_ranks(process_set_group(process_set)); });
    return std::vector<int64_t>(ranks.begin(), ranks.end());
  });
  m.class_<Ballot>("Ballot")
      // Votes without a reducer for `what`. `readiness` is a value of the bridge's enum `Readiness`.
      .def(torch::init([](int64_t process_set, const std::string& name, const std::string& what, int64_t readiness) {
        return c10::make_intrusive<Ballot>(checked([&] {
          return cast_ballot(process_set_group(process_set), name, what, static_cast<Readiness>(readiness));
        }));
      }))
      .def("result", &Ballot::result)
      .def("result_so_far", &Ballot::result_so_far)
      .def("token", &Ballot::token);
}

}  // namespace smd::torch_ext
