// The format of the core's errors: `<text> [smd:<code>]`.
#pragma once

#include <string_view>

namespace smd {

// The code of an error's text, such as `mismatch`; empty if the text has none.
inline std::string_view report_code(std::string_view report) {
  constexpr std::string_view kOpen = " [smd:";
  const auto start = report.rfind(kOpen);
  if (start == std::string_view::npos || report.back() != ']') return {};
  report.remove_prefix(start + kOpen.size());
  report.remove_suffix(1);
  return report;
}

}  // namespace smd
