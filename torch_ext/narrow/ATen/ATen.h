// Replaces PyTorch's header of the same name in this library's compilation (`_common/shims.py`).
//
// PyTorch's header declares all of its 3000 operators. Headers of torch::autograd and c10d include it and use few of
// them; most of this library's compile time would go into the others. This header includes the operators that they use,
// and the headers of ATen that are not about operators. Where that is not enough for a newer PyTorch, the library is
// compiled with PyTorch's own header.
#pragma once

#include <ATen/Context.h>
#include <ATen/Device.h>
#include <ATen/DeviceGuard.h>
#include <ATen/Formatting.h>
#include <ATen/ScalarOps.h>
#include <ATen/Tensor.h>
#include <ATen/TensorGeometry.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>
