// The name of a message in error texts, formatted only when an error needs it.
#pragma once

#include <functional>
#include <ostream>
#include <string>

namespace ldt {

/// Names a message, as in "lane F0: send to rank 1 of float32[4]". Formatting takes longer than the
/// launch itself on a device, so it is deferred. Valid during the launch only.
class MessageName {
 public:
  using Describe = std::function<std::string()>;
  /// `label` is the caller's name for the message.
  MessageName(const std::string& label, Describe describe)
      : label_(label), describe_(std::move(describe)) {}
  const std::string& label() const { return label_; }
  std::string text() const { return describe_(); }

 private:
  const std::string& label_;
  Describe describe_;
};

inline std::ostream& operator<<(std::ostream& out, const MessageName& name) {
  return out << name.text();
}

}  // namespace ldt
