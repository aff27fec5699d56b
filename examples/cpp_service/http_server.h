// httplib's requests and answers over connections that are managed here: how many clients are served, how long a whole request
// may take to arrive, and what shutdown waits for. For httplib 0.11.4 and 0.18.7 (tested) to 0.41 (compiles).
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

// Serves one request per connection, so that threads wait for requests on their way, not for clients that may ask again.
class HttpServer : public httplib::Server {
 public:
  // `arrival_timeout`: how long a whole request may take to arrive; httplib itself only bounds the time between two bytes.
  explicit HttpServer(std::chrono::milliseconds arrival_timeout) : arrival_timeout_(arrival_timeout) {}
  // Start listening. `connections` clients are served at the same time, others wait. Returns the port. Throws
  // std::runtime_error if the address cannot be bound, std::system_error if threads cannot be started.
  int Bind(const std::string& host, int port, size_t connections);
  // Serve clients until Stop, and then those already waiting. Throws std::runtime_error if nobody can connect any more.
  void Serve();
  void Stop();
  // For handlers, about the client that their thread serves: whether it no longer waits for its answer, whether its request did
  // not arrive in time, and whether the request's head is too long.
  static bool ClientGone();
  static bool ArrivedLate();
  static bool HeadTooLong();
  // From now on, requests have a second left to arrive.
  void StopReading() { reading_ = false; }
  // From now on, clients that do not read their answers are dropped.
  void StopWriting() { writing_ = false; }

 private:
  void ServeClient(int socket);

  // The first overload is for httplib until 0.15, the second for later versions, which also ask for the addresses of both ends.
  template <typename Self>
  static auto ProcessRequest(Self* self, httplib::Stream& stream, bool& closed, int)
      -> decltype(self->process_request(stream, true, closed, nullptr)) {
    return self->process_request(stream, true, closed, IgnoreRange);
  }
  template <typename Self>
  static auto ProcessRequest(Self* self, httplib::Stream& stream, bool& closed, long)
      -> decltype(self->process_request(stream, "", 0, "", 0, true, closed, nullptr)) {
    return self->process_request(stream, "", 0, "", 0, true, closed, IgnoreRange);
  }
  // Without this, a Range header makes httplib answer completions with 206, and metrics in as many parts as the client likes.
  static void IgnoreRange(httplib::Request& request) { request.ranges.clear(); }

  const std::chrono::milliseconds arrival_timeout_;
  std::atomic<bool> reading_{true}, writing_{true}, stopping_{false};
  std::optional<Listener> listener_;
  std::optional<Workers> workers_;  // last, so that they end before what they use
};

}  // namespace service
