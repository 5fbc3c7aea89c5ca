#include "status.h"

#include "smd/status.h"

namespace smd::tf_ops {

absl::Status to_status(std::string_view report) {
  if (report.empty()) return absl::OkStatus();
  const auto code = report_code(report);
  const auto status = [&report](absl::StatusCode kind) {
    return absl::Status(kind, absl::string_view(report.data(), report.size()));
  };
  if (code == "invalid_argument" || code == "config" || code == "mismatch") {
    return status(absl::StatusCode::kInvalidArgument);
  }
  if (code == "not_initialized" || code == "closed") return status(absl::StatusCode::kFailedPrecondition);
  if (code == "peer_failed") return status(absl::StatusCode::kUnavailable);
  if (code == "timeout") return status(absl::StatusCode::kDeadlineExceeded);
  if (code == "unsupported") return status(absl::StatusCode::kUnimplemented);
  if (code == "interrupted") return status(absl::StatusCode::kCancelled);
  return status(absl::StatusCode::kInternal);
}

}  // namespace smd::tf_ops
