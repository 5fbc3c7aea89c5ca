#include "tensor_parallel/products.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "boxed.h"
#include "completion.h"
#include "operations.h"
#include "status.h"
#include "tensor_parallel/chunks.h"

namespace smd::torch_ext {
namespace {

using Works = std::vector<c10::intrusive_ptr<Work>>;

void wait_for(const Works& works) {
  for (const auto& work : works) work->wait();
}

at::Tensor as_rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

at::Tensor padded(const at::Tensor& rows, int64_t wanted) {
  return rows.size(0) == wanted ? rows : at::constant_pad_nd(rows, {0, 0, 0, wanted - rows.size(0)});
}

// The number of rows of each of `ranks` shares.
int64_t share_of(int64_t rows, int64_t ranks) { return (rows + ranks - 1) / ranks; }

// The number of bits of a number of rows. Batches of similar sizes share a trial, so there are few of them.
int64_t magnitude(int64_t rows) {
  int64_t bits = 0;
  for (; rows > 0; rows /= 2) ++bits;
  return bits;
}

// Calls `body` with the beginning and the length of each of `chunks` parts of `rows`. Parts differ by one row at most.
template <class Body>
void each_chunk(int64_t rows, std::uint32_t chunks, Body&& body) {
  int64_t begin = 0;
  for (std::uint32_t at = 0; at < chunks; ++at) {
    const auto end = rows * (at + 1) / chunks;
    if (end > begin) body(begin, end - begin);
    begin = end;
  }
}

// Sums the product over the group, chunk by chunk, in place.
void sum_in_chunks(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& result, std::uint32_t chunks,
                   int64_t group) {
  if (chunks == 1) {
    auto whole = result;
    at::mm_out(whole, rows, weight);
    return run(all_reduce_(whole, "sum", group));
  }
  Works works;
  each_chunk(rows.size(0), chunks, [&](int64_t begin, int64_t length) {
    auto part = result.narrow(0, begin, length);
    at::mm_out(part, rows.narrow(0, begin, length), weight);
    works.push_back(start(all_reduce_(part, "sum", group)));
  });
  wait_for(works);
}

// Sums the product over the group so that each rank gets its share of the rows. A chunk has rows of every rank's share.
void scatter_in_chunks(const at::Tensor& rows, const at::Tensor& weight, const at::Tensor& result, std::uint32_t chunks,
                       int64_t group) {
  const auto ranks = static_cast<int64_t>(group_size(group));
  const auto shares = padded(rows, ranks * result.size(0)).view({ranks, result.size(0), rows.size(1)});
  if (chunks == 1) return run(reduce_scatter_single(result, at::mm(shares.flatten(0, 1), weight), "sum", group));
  const auto weights = weight.expand({ranks, -1, -1});
  Works works;
  each_chunk(result.size(0), chunks, [&](int64_t begin, int64_t length) {
    const auto partial = at::bmm(shares.narrow(1, begin, length), weights).flatten(0, 1);
    works.push_back(start(reduce_scatter_single(result.narrow(0, begin, length), partial, "sum", group)));
  });
  wait_for(works);
}

// Whether the gradients of products of one input with several weights are multiplied as one matrix. The copy into that
// matrix must move no more elements than the products for the input's gradient do otherwise: each of them but the first
// reads and writes their sum. Compilers expect that each result begins at a multiple of 16 bytes.
bool are_better_joined(const std::vector<at::Tensor>& gradients, int64_t features) {
  int64_t columns = 0;
  for (const auto& gradient : gradients) columns += gradient.size(1);
  const auto row_bytes = features * static_cast<int64_t>(gradients[0].element_size());
  return gradients.size() > 1 && row_bytes % 16 == 0 &&
         columns <= static_cast<int64_t>(gradients.size() - 1) * features;
}

at::Tensor meta_summed_product(const at::Tensor& input, const at::Tensor& weight, bool shares_rows, int64_t group) {
  auto shape = input.sym_sizes().vec();
  shape.back() = weight.sym_size(0);
  if (shares_rows) {
    const auto ranks = static_cast<int64_t>(group_size(group));
    c10::SymInt rows = 1;
    for (std::size_t at = 0; at + 1 < shape.size(); ++at) rows = rows * shape[at];
    shape = {(rows + (ranks - 1)) / ranks, shape.back()};
  }
  return input.new_empty_symint(shape);
}

std::vector<at::Tensor> meta_gathered_products(const at::Tensor& own, at::TensorList weights,
                                               const c10::List<std::optional<at::Tensor>>&, c10::SymInt rows, int64_t) {
  std::vector<at::Tensor> results{own.new_empty_symint({rows, own.sym_size(1)})};
  for (const auto& weight : weights) results.push_back(own.new_empty_symint({rows, weight.sym_size(0)}));
  return results;
}

std::vector<at::Tensor> meta_products_backward(at::TensorList, const at::Tensor& input, at::TensorList weights,
                                               const c10::List<bool>& needs, c10::SymInt share, int64_t) {
  std::vector<at::Tensor> results;
  if (!needs.get(0)) {
    results.push_back(input.new_empty({0}));
  } else if (share < 0) {
    results.push_back(input.new_empty_symint(input.sym_sizes()));
  } else {
    results.push_back(input.new_empty_symint({share, input.sym_size(-1)}));
  }
  for (std::size_t at = 0; at < weights.size(); ++at) {
    results.push_back(needs.get(at + 1) ? weights[at].new_empty_symint(weights[at].sym_sizes())
                                        : weights[at].new_empty({0}));
  }
  return results;
}

}  // namespace

at::Tensor summed_product(const at::Tensor& input, const at::Tensor& weight, bool shares_rows, int64_t group) {
  return checked([&] {
    const auto rows = as_rows(input);
    const auto factor = weight.t();
    auto shape = input.sizes().vec();
    shape.back() = weight.size(0);
    if (shares_rows) shape = {share_of(rows.size(0), static_cast<int64_t>(group_size(group))), weight.size(0)};
    const auto result = input.new_empty(shape);
    const auto flat = as_rows(result);
    const auto product = [&](std::uint32_t chunks) {
      (shares_rows ? scatter_in_chunks : sum_in_chunks)(rows, factor, flat, chunks, group);
    };
    if (!input.is_cuda()) {
      product(1);
    } else {
      const ProductKey key{static_cast<int64_t>(session_id()),
                           group,
                           input.device().index(),
                           magnitude(rows.size(0)),
                           rows.size(1),
                           weight.size(0),
                           static_cast<int64_t>(input.scalar_type()),
                           shares_rows};
      run_in_chunks(key, input.device(), group, product);
    }
    return result;
  });
}

std::vector<at::Tensor> gathered_products(const at::Tensor& own, at::TensorList weights,
                                          const c10::List<std::optional<at::Tensor>>& biases, int64_t rows,
                                          int64_t group) {
  return checked([&] {
    const auto share = own.size(0);
    const auto ranks = static_cast<int64_t>(group_size(group));
    const auto begin = std::min(rows, static_cast<int64_t>(group_rank(group)) * share);
    const auto end = std::min(rows, begin + share);
    const auto all = own.new_empty({ranks * share, own.size(1)});
    const auto gathered = start(all_gather_single(all, own.contiguous(), group));
    std::vector<at::Tensor> results{all.narrow(0, 0, rows)};
    for (const auto& weight : weights) results.push_back(own.new_empty({rows, weight.size(0)}));
    const auto multiply = [&](const at::Tensor& from, int64_t first, int64_t last) {
      if (first == last) return;
      for (std::size_t at = 0; at < weights.size(); ++at) {
        auto part = results[at + 1].narrow(0, first, last - first);
        const std::optional<at::Tensor> bias = biases.get(at);
        if (bias.has_value()) {
          at::addmm_out(part, *bias, from, weights[at].t());
        } else {
          at::mm_out(part, from, weights[at].t());
        }
      }
    };
    multiply(own.narrow(0, 0, end - begin), begin, end);
    gathered->wait();
    multiply(all.narrow(0, 0, begin), 0, begin);
    multiply(all.narrow(0, end, rows - end), end, rows);
    return results;
  });
}

std::vector<at::Tensor> products_backward(at::TensorList gradients, const at::Tensor& input, at::TensorList weights,
                                          const c10::List<bool>& needs, int64_t share, int64_t group) {
  return checked([&] {
    // Weights' gradients that are rows of one tensor are no views for autograd.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> rows;
    for (const auto& gradient : gradients) rows.push_back(as_rows(gradient));
    const auto every = std::all_of(needs.begin() + 1, needs.end(), [](bool needed) { return needed; });
    const auto joins = (needs.get(0) || every) && are_better_joined(rows, input.size(-1));
    const auto joined = joins ? at::cat(rows, 1) : at::Tensor();
    std::vector<at::Tensor> results{input.new_empty({0})};
    c10::intrusive_ptr<Work> sum;
    if (needs.get(0)) {
      auto partial = joins ? at::mm(joined, at::cat(weights)) : at::mm(rows[0], weights[0]);
      for (std::size_t at = 1; at < rows.size() && !joins; ++at) partial.addmm_(rows[at], weights[at]);
      if (share < 0) {
        results[0] = partial.view(input.sizes());
        sum = start(all_reduce_(results[0], "sum", group));
      } else {
        results[0] = partial.new_empty({share, partial.size(1)});
        const auto whole = padded(partial, share * static_cast<int64_t>(group_size(group)));
        sum = start(reduce_scatter_single(results[0], whole, "sum", group));
      }
    }
    const auto inputs = as_rows(input);
    if (joins && every) {
      const auto whole = at::mm(joined.t(), inputs);
      int64_t begin = 0;
      for (const auto& weight : weights) {
        results.push_back(whole.narrow(0, begin, weight.size(0)));
        begin += weight.size(0);
      }
    } else {
      for (std::size_t at = 0; at < rows.size(); ++at) {
        results.push_back(needs.get(at + 1) ? at::mm(rows[at].t(), inputs) : weights[at].new_empty({0}));
      }
    }
    if (sum != nullptr) sum->wait();
    return results;
  });
}

TORCH_LIBRARY_FRAGMENT(smd, m) {
  // Called at the beginning of each step function.
  m.def("begin_step_of_products() -> ()", boxed<&begin_step_of_products>());
  m.def("summed_product(Tensor input, Tensor weight, bool shares_rows, int group) -> Tensor");
  m.def("gathered_products(Tensor own, Tensor[] weights, Tensor?[] biases, SymInt rows, int group) -> Tensor[]");
  m.def(
      "products_backward(Tensor[] gradients, Tensor input, Tensor[] weights, bool[] needs, SymInt share, int group)"
      " -> Tensor[]");
}

TORCH_LIBRARY_IMPL(smd, CompositeExplicitAutograd, m) {
  m.impl("summed_product", boxed<&summed_product>());
  m.impl("gathered_products", boxed<&gathered_products>());
  m.impl("products_backward", boxed<&products_backward>());
}

TORCH_LIBRARY_IMPL(smd, Meta, m) {
  m.impl("summed_product", boxed<&meta_summed_product>());
  m.impl("gathered_products", boxed<&meta_gathered_products>());
  m.impl("products_backward", boxed<&meta_products_backward>());
}

}  // namespace smd::torch_ext
