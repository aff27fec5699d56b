// The port that clients connect to.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace service {

class Listener {
 public:
  // `port` 0: any that is free. Throws std::runtime_error: one line.
  Listener(const std::string& host, int port);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const;
  int socket() const { return socket_; }
  // A client's socket; none where nobody came within `moment`, or nobody could be let in. Throws std::runtime_error where nobody
  // ever can be again.
  std::optional<int> Accept(std::chrono::milliseconds moment);

 private:
  int socket_ = -1;
  bool told_ = false;  // that the system has no room
};

}  // namespace service
