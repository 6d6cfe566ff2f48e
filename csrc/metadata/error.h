// The one exception of the wire format: it knows neither torch nor Python.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ldt::metadata {

/// A message cannot be written or read; the text says what was expected, what was found and what to
/// do. Bound to Python as `ldt.errors.MetadataError`.
class MetadataError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws MetadataError with the concatenated arguments as its text.
template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  std::ostringstream text;
  (text << ... << args);
  throw MetadataError(text.str());
}

}  // namespace ldt::metadata
