#include "status.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
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

absl::Status to_horovod_status(std::string_view report, bool submitted) {
  if (report.empty()) return absl::OkStatus();
  const auto code = report_code(report);
  const auto text = report.substr(0, std::min(report.size(), report.rfind(" [smd:")));
  if (code == "not_initialized") {
    return absl::FailedPreconditionError("Horovod has not been initialized; use hvd.init().");
  }
  const absl::string_view message(text.data(), text.size());
  const bool is_argument = code == "invalid_argument" || code == "config";
  if (is_argument && !submitted) return absl::InvalidArgumentError(message);
  if (is_argument || code == "mismatch") return absl::FailedPreconditionError(message);
  if (code == "unsupported") return absl::AbortedError(message);
  if (code == "interrupted") return absl::CancelledError(message);
  return absl::UnknownError(absl::StrCat(message, ". Horovod has been shut down."));
}

}  // namespace smd::tf_ops
