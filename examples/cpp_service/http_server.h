// httplib's server, with what it leaves open: how long a whole request may take to arrive, and what shutdown waits for.
#pragma once

#include <httplib.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>

namespace service {

// One request a connection: threads wait for requests that arrive, not for clients that may ask again.
class HttpServer : public httplib::Server {
 public:
  // `arrival`: of a whole request; httplib itself bounds the time between two bytes.
  explicit HttpServer(std::chrono::milliseconds arrival) : arrival_(arrival) {}
  // Room for so many connections that wait to be accepted; httplib's own 5 make clients that come at once time out.
  bool ListenFor(int connections) { return ::listen(svr_sock_, connections) == 0; }
  // From now on a request has a second to be here.
  void StopReading() { reading_ = false; }
  // From now on clients that do not take their answers are left.
  void StopWriting() { writing_ = false; }

 private:
  bool process_and_close_socket(socket_t socket) override;

  // httplib until 0.15, and since, when it wants to be told the addresses of both ends.
  template <typename Self>
  static auto Answer(Self* self, httplib::Stream& stream, bool& closed, int)
      -> decltype(self->process_request(stream, true, closed, nullptr)) {
    return self->process_request(stream, true, closed, nullptr);
  }
  template <typename Self>
  static auto Answer(Self* self, httplib::Stream& stream, bool& closed, long)
      -> decltype(self->process_request(stream, "", 0, "", 0, true, closed, nullptr)) {
    return self->process_request(stream, "", 0, "", 0, true, closed, nullptr);
  }

  const std::chrono::milliseconds arrival_;
  std::atomic<bool> reading_{true}, writing_{true};
};

}  // namespace service
