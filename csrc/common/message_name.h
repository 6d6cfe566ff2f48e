// How an error text begins: made only if there is an error.
#pragma once

#include <functional>
#include <ostream>
#include <string>

namespace ldt {

/// Names a message, such as "lane F0: send to rank 1 of float32[4]". Describing one takes longer
/// than launching it on a device, so this holds what can do it, for as long as the launch.
class MessageName {
 public:
  using Describe = std::function<std::string()>;
  /// `label` is what the caller calls the message.
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
