#include "status.h"

#include <c10/util/Exception.h>

#include "smd/status.h"

namespace smd::torch_ext {

void throw_report(const std::string& report) {
  const auto code = report_code(report);
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  // Invalid arguments become ValueError in Python, unsupported operations NotImplementedError, and all else
  // torch.distributed.DistBackendError, a RuntimeError. smdistributed's Python code maps the error code to its own
  // classes.
  if (code == "invalid_argument" || code == "config") throw c10::ValueError(here, report);
  if (code == "unsupported") throw c10::NotImplementedError(here, report);
  throw c10::DistBackendError(here, report);
}

}  // namespace smd::torch_ext
