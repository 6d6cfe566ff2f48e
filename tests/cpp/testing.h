// A test program in one header: TEST(name) { EXPECT(...); } per case; main() runs all and counts
// failures.
//
// Include it in one file per executable. A case that throws fails with the exception's text; the
// next one still runs.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace ldt::testing {

struct Case {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

inline bool add(const char* name, std::function<void()> body) {
  cases().push_back({name, std::move(body)});
  return true;
}

inline void fail(const char* file, int line, const std::string& text) {
  ++failures();
  std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
}

template <typename Left, typename Right>
void expect_equal(const Left& got, const Right& expected, const char* file, int line,
                  const char* expression) {
  if (got == expected) return;
  std::ostringstream text;
  text << expression << ": expected " << expected << ", got " << got;
  fail(file, line, text.str());
}

// Runs body and expects an exception of type Error whose text contains `part`.
template <typename Error>
void expect_throw(const std::function<void()>& body, const std::string& part, const char* file,
                  int line) {
  try {
    body();
  } catch (const Error& error) {
    const std::string text = error.what();
    if (text.find(part) == std::string::npos) {
      fail(file, line, "expected an error with '" + part + "', got: " + text);
    }
    return;
  }
  fail(file, line, "expected an error with '" + part + "', got none");
}

inline int run() {
  for (const auto& test : cases()) {
    const int before = failures();
    try {
      test.body();
    } catch (const std::exception& error) {
      fail(test.name, 0, std::string("exception: ") + error.what());
    }
    std::printf("%s %s\n", failures() == before ? "pass" : "FAIL", test.name);
  }
  return failures() == 0 ? 0 : 1;
}

}  // namespace ldt::testing

#define TEST(name)                                                                  \
  static void name();                                                               \
  [[maybe_unused]] static const bool name##_added = ldt::testing::add(#name, name); \
  static void name()
#define EXPECT(condition) \
  ((condition) ? void() : ldt::testing::fail(__FILE__, __LINE__, "expected: " #condition))
#define EXPECT_EQ(got, expected) \
  ldt::testing::expect_equal((got), (expected), __FILE__, __LINE__, #got)
#define EXPECT_THROW(statement, Error, part) \
  ldt::testing::expect_throw<Error>([&] { statement; }, (part), __FILE__, __LINE__)

int main() { return ldt::testing::run(); }
