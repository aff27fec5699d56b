// httplib's requests and answers, over connections of our own: who is let in, how long a whole request may take to arrive, and
// what shutdown waits for. For httplib from 0.11.4 (on which it is tested) to 0.41 (for which it compiles).
#pragma once

#include <httplib.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>

#include "listener.h"
#include "workers.h"

namespace service {

// One request a connection: threads wait for requests that arrive, not for clients that may ask again.
class HttpServer : public httplib::Server {
 public:
  // `arrival`: of a whole request; httplib itself bounds the time between two bytes.
  explicit HttpServer(std::chrono::milliseconds arrival) : arrival_(arrival) {}
  // From now on clients can connect; so many are served at the same time, others wait. Returns the port. Throws
  // std::runtime_error for an address that cannot be had, std::system_error for threads that cannot.
  int Bind(const std::string& host, int port, size_t connections);
  // Serve clients until Stop, and then those who wait; throws std::runtime_error where nobody can connect any more.
  void Serve();
  void Stop();
  // For handlers, of the client that their thread serves: whether nobody waits for its answer, and whether its request was not
  // here in time, or has too long a head.
  static bool ClientGone();
  static bool ArrivedLate();
  static bool LongHead();
  // From now on a request has a second to be here.
  void StopReading() { reading_ = false; }
  // From now on clients that do not take their answers are left.
  void StopWriting() { writing_ = false; }

 private:
  void ServeClient(int socket);

  // httplib until 0.15, and since, when it wants to be told the addresses of both ends.
  template <typename Self>
  static auto Answer(Self* self, httplib::Stream& stream, bool& closed, int)
      -> decltype(self->process_request(stream, true, closed, nullptr)) {
    return self->process_request(stream, true, closed, IgnoreRange);
  }
  template <typename Self>
  static auto Answer(Self* self, httplib::Stream& stream, bool& closed, long)
      -> decltype(self->process_request(stream, "", 0, "", 0, true, closed, nullptr)) {
    return self->process_request(stream, "", 0, "", 0, true, closed, IgnoreRange);
  }
  // httplib would answer a completion with 206, and metrics in as many parts as a client likes.
  static void IgnoreRange(httplib::Request& request) { request.ranges.clear(); }

  const std::chrono::milliseconds arrival_;
  std::atomic<bool> reading_{true}, writing_{true}, stopping_{false};
  std::optional<Listener> listener_;
  std::optional<Workers> workers_;  // gone before what they serve with
};

}  // namespace service
