// Host checks. The ops raise RuntimeError; the Python surface turns the two prefixes into TypeError
// and ValueError with the same words (moelora/_errors.py), so that each check is written once.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace moelora {

template <class... Parts>
[[noreturn]] void fail(const char* prefix, const Parts&... parts) {
  std::ostringstream message;
  message << prefix;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// Wrong dtype or device kind of thing: TypeError in Python.
template <class... Parts>
void check_type(bool ok, const Parts&... parts) {
  if (!ok) fail("moelora type error: ", parts...);
}

// Everything else that is wrong with an argument: ValueError in Python.
template <class... Parts>
void check_value(bool ok, const Parts&... parts) {
  if (!ok) fail("moelora value error: ", parts...);
}

}  // namespace moelora
