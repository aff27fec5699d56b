// The port that clients connect to.
#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace service {

class Listener {
 public:
  // `port` 0: any free one. Throws std::runtime_error with a one-line message.
  Listener(const std::string& host, int port);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const;
  int socket() const { return socket_; }
  // The next client's socket; nullopt if nobody came within `timeout` or could be accepted. Throws std::runtime_error if no
  // client can ever be accepted again.
  std::optional<int> Accept(std::chrono::milliseconds timeout);

 private:
  int socket_ = -1;
  bool reported_no_room_ = false;
};

}  // namespace service
