#include "http_server.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <utility>

namespace service {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPollInterval{50};  // between checks of whether to go on waiting
constexpr std::chrono::seconds kWriteTimeout{5};        // for a client to accept any byte of its answer
constexpr std::chrono::seconds kLingerTimeout{2};       // for a client to read an answer that came before its request had ended
constexpr std::chrono::seconds kShutdownGrace{1};     // at shutdown, for a request on its way to arrive and be answered with 503
constexpr size_t kMaxRequestBytes = size_t{8} << 20;  // of a request: a body of 1 MiB in one-byte chunks takes 6 MiB
constexpr size_t kMaxHeadBytes = size_t{64} << 10;
constexpr size_t kMaxFirstLineBytes = size_t{16} << 10;  // httplib refuses more than 8 KiB, but from 32 on 0.18 does not answer
constexpr size_t kMaxHeadLines = 102;  // of a head: httplib 0.18 takes 100 headers, beside the first line and the empty one
constexpr std::string_view kLineEnd = "\r\n";
constexpr std::string_view kHeadEnd = "\n\r\n";  // an empty line as httplib recognises it

// A client's socket, which is read until a deadline. Without `override`, because httplib's virtual functions differ by version:
// 0.18 calls is_writable where 0.41 has wait_readable, wait_writable and duration.
class Connection : public httplib::Stream {
 public:
  Connection(socket_t socket, Clock::time_point arrival_deadline, const std::atomic<bool>& reading,
             const std::atomic<bool>& writing)
      : socket_(socket), arrival_deadline_(arrival_deadline), reading_(reading), writing_(writing) {}

  bool is_readable() const { return next_ < end_; }
  bool wait_readable() const { return is_readable() || WaitForBytes(&arrival_deadline_); }
  // Also checks that the client is still there.
  bool is_writable() const { return !Gone() && WaitForRoom(); }
  bool wait_writable() const { return is_writable(); }
  time_t duration() const { return 0; }  // only httplib's clients call it
  ssize_t read(char* data, size_t size) {
    if (head_too_long()) {
      if (head_lines_ > 0 || line_end_given_ == kLineEnd.size()) return -1;
      *data = kLineEnd[line_end_given_++];  // httplib does not answer if not even the first line ends
      return 1;
    }
    if (next_ == end_) {
      if (received_bytes_ > kMaxRequestBytes) return -1;
      late_ = !WaitForBytes(&arrival_deadline_);
      if (late_) return -1;
      const ssize_t received = ::recv(socket_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (received <= 0) return received;
      next_ = 0;
      end_ = static_cast<size_t>(received);
      received_bytes_ += end_;
    }
    size_t given = 0;
    // byte by byte, as httplib reads a head, so that where a long one is cut off does not depend on packets
    while (!head_ended_ && !head_too_long() && given < size && next_ < end_) CountHeadByte(data[given++] = buffer_[next_++]);
    if (head_ended_) {
      const size_t rest = std::min(size - given, end_ - next_);
      std::copy_n(buffer_.data() + next_, rest, data + given);
      next_ += rest;
      given += rest;
    }
    return static_cast<ssize_t>(given);
  }
  ssize_t write(const char* data, size_t size) {
    if (!WaitForRoom()) return -1;
    return ::send(socket_, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  void get_remote_ip_and_port(std::string&, int&) const {}
  void get_local_ip_and_port(std::string&, int&) const {}
  socket_t socket() const { return socket_; }

  // Whether the client is gone or has closed its sending half: the two look the same.
  bool Gone() const {
    pollfd polled{socket_, POLLRDHUP, 0};  // seen even behind unread bytes
    return ::poll(&polled, 1, 0) > 0;
  }
  // Whether reading ended because the rest of the request did not arrive in time.
  bool late() const { return late_; }
  // Whether it ended because the head has more bytes or lines than are served.
  bool head_too_long() const {
    const size_t most = head_lines_ == 0 ? kMaxFirstLineBytes : kMaxHeadBytes;
    return !head_ended_ && (head_bytes_ == most || head_lines_ == kMaxHeadLines);
  }

  // Read and discard what the client still sends: closing the socket before that could cost the client its answer.
  void Linger() {
    ::shutdown(socket_, SHUT_WR);
    Clock::time_point until = Clock::now() + kLingerTimeout;
    while (WaitForBytes(&until) && ::recv(socket_, buffer_.data(), buffer_.size(), MSG_DONTWAIT) > 0) {
    }
  }

 private:
  // Whether the socket gets ready before `until`, which is moved to at most `grace` from now once `going_on` is false.
  bool Wait(short events, Clock::time_point* until, const std::atomic<bool>& going_on, std::chrono::milliseconds grace) const {
    for (;;) {
      const Clock::time_point now = Clock::now();
      if (!going_on) *until = std::min(*until, now + grace);
      const auto remaining = std::chrono::ceil<std::chrono::milliseconds>(*until - now);
      if (remaining.count() <= 0) return false;
      pollfd polled{socket_, events, 0};
      const int ready = ::poll(&polled, 1, static_cast<int>(std::min(remaining, kPollInterval).count()));
      if (ready > 0) return true;
      if (ready < 0 && errno != EINTR) return false;
    }
  }
  bool WaitForBytes(Clock::time_point* until) const { return Wait(POLLIN, until, reading_, kShutdownGrace); }
  bool WaitForRoom() const {
    Clock::time_point until = Clock::now() + kWriteTimeout;
    return Wait(POLLOUT, &until, writing_, std::chrono::milliseconds(0));
  }

  void CountHeadByte(char byte) {
    ++head_bytes_;
    if (byte == '\n') ++head_lines_;
    head_end_matched_ = byte == kHeadEnd[head_end_matched_] ? head_end_matched_ + 1 : size_t{byte == kHeadEnd[0]};
    head_ended_ = head_end_matched_ == kHeadEnd.size();
  }

  const socket_t socket_;
  mutable Clock::time_point arrival_deadline_;  // earlier once the server stops
  const std::atomic<bool>&reading_, &writing_;
  std::array<char, 16384> buffer_{};
  size_t next_ = 0, end_ = 0;               // what was received but not read yet
  size_t received_bytes_ = 0;               // bytes received of this request
  size_t head_bytes_ = 0, head_lines_ = 0;  // of its head, read so far
  size_t head_end_matched_ = 0;             // bytes of kHeadEnd that the head's last bytes match
  size_t line_end_given_ = 0;               // bytes of kLineEnd that stood in for the end of a first line that is too long
  bool late_ = false, head_ended_ = false;
};

thread_local const Connection* current_connection = nullptr;  // this thread's; httplib does not pass connections to handlers

}  // namespace

int HttpServer::Bind(const std::string& host, int port, size_t connections) {
  listener_.emplace(host, port);
  svr_sock_ = listener_->socket();  // httplib ends its streams once this is INVALID_SOCKET
  workers_.emplace(connections, [this](int socket) { ServeClient(socket); });
  return listener_->port();
}

void HttpServer::Serve() {
  std::optional<Clock::time_point> accept_until;  // when to stop accepting: clients may keep coming forever
  while (!accept_until || Clock::now() < *accept_until) {
    if (stopping_ && !accept_until) accept_until = Clock::now() + kShutdownGrace;
    if (!workers_->WaitForIdleThread(kPollInterval)) continue;
    const std::optional<int> client = listener_->Accept(accept_until ? std::chrono::milliseconds(0) : kPollInterval);
    if (client) workers_->Serve(*client);
    if (accept_until && !client) return;
  }
}

void HttpServer::Stop() {
  svr_sock_ = INVALID_SOCKET;
  stopping_ = true;
}

bool HttpServer::ClientGone() { return current_connection->Gone(); }

bool HttpServer::ArrivedLate() { return current_connection->late(); }

bool HttpServer::HeadTooLong() { return current_connection->head_too_long(); }

void HttpServer::ServeClient(int socket) {
  try {
    Connection connection(socket, Clock::now() + arrival_timeout_, reading_, writing_);
    current_connection = &connection;
    bool closed = true;
    if (ProcessRequest(this, connection, closed, 0)) connection.Linger();
  } catch (const std::exception& error) {  // in the middle of an answer, or out of memory: others are still served
    std::cerr << "a connection failed: " << error.what() << std::endl;
  }
  current_connection = nullptr;
  ::close(socket);
}

}  // namespace service
