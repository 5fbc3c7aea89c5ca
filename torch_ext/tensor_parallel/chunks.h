// The number of chunks of a product, which the first steps measure.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "smd/operation.h"

namespace smd::torch_ext {

// What products with the same trial have in common: session, group, device, magnitude of the number of rows, features,
// results, element type, and whether ranks get shares of the rows.
using ProductKey = std::vector<std::int64_t>;

// Begins a step: products are divided in another way from here on, if they are in their trial.
void begin_step_of_products();

// Runs `product` in as many chunks as the trial of `key` says, and times it if this call is part of the trial.
//
// Every member of `group` makes the same calls in the same order, and has begun the same number of steps (TRIAL-1).
// After the measured steps of a key, the host waits once for the device and for the other members. With
// `torch.use_deterministic_algorithms(True)`, a product is one chunk.
//
// Args:
//   device: The current device, a CUDA one.
void run_in_chunks(const ProductKey& key, c10::Device device, std::int64_t group,
                   const std::function<void(std::uint32_t chunks)>& product);

}  // namespace smd::torch_ext
