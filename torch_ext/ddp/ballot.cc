#include "ddp/ballot.h"

#include <torch/library.h>

#include <string>
#include <vector>

#include "boxed.h"
#include "status.h"

namespace smd::torch_ext {

int64_t Ballot::result() const {
  return static_cast<int64_t>(checked([&] { return core_->result(); }));
}

int64_t Ballot::result_so_far() const { return core_->is_decided() ? result() : -1; }

namespace {

std::vector<int64_t> process_set_members(int64_t process_set) {
  const auto ranks = checked([&] { return group_ranks(process_set_group(process_set)); });
  return {ranks.begin(), ranks.end()};
}

// Votes without a reducer for `what`. `readiness` is a value of the bridge's enum `Readiness`.
c10::intrusive_ptr<Ballot> make_ballot(int64_t process_set, const std::string& name, const std::string& what,
                                       int64_t readiness) {
  return c10::make_intrusive<Ballot>(checked(
      [&] { return cast_ballot(process_set_group(process_set), name, what, static_cast<Readiness>(readiness)); }));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(smd, m) {
  // The global ranks of a process set, in the form in which reducers take them.
  m.def("process_set_members(int process_set) -> int[]", boxed<&process_set_members>());
  BoxedClass<Ballot>(m, "Ballot")
      .init<&make_ballot>("int process_set, str name, str what, int readiness")
      .def<&Ballot::result>("result() -> int")
      .def<&Ballot::result_so_far>("result_so_far() -> int")
      .def<&Ballot::token>("token() -> int");
}

}  // namespace smd::torch_ext
