#include "ddp/pending_reducer.h"

#include "status.h"

namespace smd::torch_ext {

PendingReducer::PendingReducer(int64_t token, std::vector<at::Tensor> parameters, std::vector<std::string> names,
                               const std::vector<int64_t>& ranks, const std::vector<int64_t>& bucket_bytes,
                               const Reducer::Settings& settings, const std::vector<int64_t>& order)
    : parameters_(Reducer::named(std::move(parameters), std::move(names))), settings_(settings), core_(checked([&] {
        const auto described = Reducer::describe_all(parameters_, {});
        const std::vector<std::size_t> members(ranks.begin(), ranks.end());
        const std::vector<std::size_t> places(order.begin(), order.end());
        return create_reducer_async(
            static_cast<std::uint64_t>(token), {members.data(), members.size()}, {described.data(), described.size()},
            Reducer::options(bucket_bytes, settings, parameters_), {places.data(), places.size()});
      })) {}

c10::intrusive_ptr<Reducer> PendingReducer::take() {
  return Reducer::over(std::move(parameters_), {}, checked([&] { return core_->take(); }), settings_);
}

}  // namespace smd::torch_ext
