#include "ddp/sparse.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>

#include <string>

#include "adapter.h"
#include "completion.h"
#include "operations.h"
#include "status.h"

namespace smd::torch_ext {
namespace {

// The columns of the table that ranks exchange before the gradients.
enum Column : int64_t { Kind, Entries, SparseDimensions, NumColumns };
enum Kinds : int64_t { None, Sparse, Dense };

void run_now(const TensorOperation& operation) {
  checked([&] { run(operation); });
}

// Gathers the tensors `mine` of all ranks along `dim`; rank i has `counts[i]` entries there.
at::Tensor gather_entries(const at::Tensor& mine, int64_t dim, const std::vector<int64_t>& counts, int64_t group) {
  std::vector<at::Tensor> blocks;
  for (const auto count : counts) {
    auto sizes = mine.sizes().vec();
    sizes[static_cast<std::size_t>(dim)] = count;
    blocks.push_back(at::empty(sizes, mine.options()));
  }
  run_now(all_gather(blocks, mine.contiguous(), group));
  return at::cat(blocks, dim);
}

at::Tensor average_dense(const at::Tensor& gradient, const at::Tensor& like, int64_t group) {
  auto dense = gradient.defined() ? gradient.is_sparse() ? gradient.to_dense() : gradient.contiguous()
                                  : at::zeros(like.sizes(), like.options().requires_grad(false));
  run_now(all_reduce_(dense, "average", group));
  return dense;
}

at::Tensor average_of_entries(const at::Tensor& gradient, const at::Tensor& like, const std::vector<int64_t>& counts,
                              int64_t sparse_dimensions, int64_t group) {
  at::Tensor indices;
  at::Tensor values;
  if (gradient.defined()) {
    indices = gradient._indices();
    values = gradient._values();
  } else {
    auto sizes = like.sizes().slice(static_cast<std::size_t>(sparse_dimensions)).vec();
    sizes.insert(sizes.begin(), 0);
    const auto options = like.options().requires_grad(false);
    indices = at::empty({sparse_dimensions, 0}, options.dtype(at::kLong));
    values = at::empty(sizes, options);
  }
  indices = gather_entries(indices, 1, counts, group);
  values = gather_entries(values, 0, counts, group);
  // Entries of one row are summed in rank order, as in a dense reduction.
  auto sum = at::sparse_coo_tensor(indices, values, like.sizes()).coalesce();
  sum._values().div_(static_cast<int64_t>(counts.size()));
  return sum;
}

}  // namespace

std::vector<at::Tensor> average_sparse(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& like,
                                       int64_t group) {
  const auto count = static_cast<int64_t>(gradients.size());
  const auto ranks = static_cast<int64_t>(group_size(static_cast<std::uint64_t>(group)));
  std::vector<at::Tensor> mine;
  auto header = at::zeros({count, NumColumns}, at::kLong);
  auto values = header.accessor<int64_t, 2>();
  for (const auto i : c10::irange(count)) {
    const auto& gradient = gradients[static_cast<std::size_t>(i)];
    mine.push_back(gradient.defined() && gradient.is_sparse() ? gradient.coalesce() : gradient);
    if (!gradient.defined()) continue;
    values[i][Kind] = gradient.is_sparse() ? Sparse : Dense;
    if (!gradient.is_sparse()) continue;
    values[i][Entries] = mine.back()._nnz();
    values[i][SparseDimensions] = mine.back().sparse_dim();
  }
  auto headers = at::empty({ranks, count, NumColumns}, at::kLong);
  run_now(all_gather_single(headers.view({ranks * count, NumColumns}), header, group));

  std::vector<at::Tensor> averages;
  const auto all = headers.accessor<int64_t, 3>();
  for (const auto i : c10::irange(count)) {
    int64_t kind = None;
    int64_t sparse_dimensions = 0;
    std::vector<int64_t> counts;
    for (const auto rank : c10::irange(ranks)) {
      kind = std::max(kind, all[rank][i][Kind]);
      sparse_dimensions = std::max(sparse_dimensions, all[rank][i][SparseDimensions]);
      counts.push_back(all[rank][i][Entries]);
    }
    const auto& gradient = mine[static_cast<std::size_t>(i)];
    const auto& shape = like[static_cast<std::size_t>(i)];
    if (kind == None) {
      averages.emplace_back();
    } else if (kind == Dense) {
      note_fallback("gradients_one_by_one");
      TORCH_WARN_ONCE("the gradient of an embedding with `sparse=True`, of shape ", shape.sizes(),
                      ", is dense on at least one rank, so it is reduced as a whole after the backward: use "
                      "`sparse=False` if the weight is also used without a lookup; further ones are counted as "
                      "`gradients_one_by_one` in the metrics");
      averages.push_back(average_dense(gradient, shape, group));
    } else {
      averages.push_back(average_of_entries(gradient, shape, counts, sparse_dimensions, group));
    }
  }
  return averages;
}

}  // namespace smd::torch_ext
