// The exception type of the wire format, independent of torch and Python.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ldt::metadata {

/// A message cannot be written or read. The text says what was expected, what was found and what to
/// do. Python sees it as `ldt.errors.MetadataError`.
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

/// Runs `step` and prefixes the text of its MetadataError with `title()`, which is called only
/// then.
template <typename Title, typename Step>
decltype(auto) with_title(const Title& title, const Step& step) {
  try {
    return step();
  } catch (const MetadataError& error) {
    fail(title(), ": ", error.what());
  }
}

/// The title for tensor `tensor` of hop `hop` in the message's table.
inline auto title_of_hop(size_t hop, size_t tensor) {
  return [=] { return "hop " + std::to_string(hop) + ", tensor " + std::to_string(tensor); };
}

}  // namespace ldt::metadata
