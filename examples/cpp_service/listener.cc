#include "listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace service {
namespace {

constexpr std::chrono::milliseconds kRetryDelay{10};  // before retrying after an error that may persist

std::string Reason(int error) { return std::generic_category().message(error); }

std::string Remedy(int error) {
  if (error == EADDRNOTAVAIL) return "name an address of this machine with --host";
  if (error == EACCES) return "choose a --port above 1023";
  return "choose another --port";
}

void EnableOption(int socket, int level, int option) {
  const int on = 1;
  ::setsockopt(socket, level, option, &on, sizeof on);
}

// Bind and listen; returns 0, or the errno of the call that failed.
int Listen(int socket, const addrinfo& address) {
  // takes a port whose old connections are still closing, but not one that another process listens on. SO_REUSEPORT,
  // httplib's default, would share the port with a second service
  EnableOption(socket, SOL_SOCKET, SO_REUSEADDR);
  EnableOption(socket, IPPROTO_TCP, TCP_NODELAY);  // accepted sockets inherit it
  if (::bind(socket, address.ai_addr, address.ai_addrlen) != 0) return errno;
  // clients that find no thread free wait in this backlog; those beyond it time out or are reset
  return ::listen(socket, SOMAXCONN) == 0 ? 0 : errno;
}

}  // namespace

Listener::Listener(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* addresses = nullptr;
  const int lookup_error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &addresses);
  if (lookup_error != 0) {
    const std::string reason = lookup_error == EAI_SYSTEM ? Reason(errno) : ::gai_strerror(lookup_error);
    throw std::runtime_error("--host: '" + host + "' is not an address (" + reason + "); name one of this machine");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(addresses, ::freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* each = addresses; each != nullptr; each = each->ai_next) {
    // non-blocking, so that accept() does not wait if the client that poll() saw is gone by then
    socket_ = ::socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, each->ai_protocol);
    error = socket_ < 0 ? errno : Listen(socket_, *each);
    if (error == 0) return;
    if (socket_ >= 0) ::close(socket_);
  }
  throw std::runtime_error(host + ":" + std::to_string(port) + ": cannot listen (" + Reason(error) + "); " + Remedy(error));
}

Listener::~Listener() { ::close(socket_); }

int Listener::port() const {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

std::optional<int> Listener::Accept(std::chrono::milliseconds timeout) {
  pollfd polled{socket_, POLLIN, 0};
  if (::poll(&polled, 1, static_cast<int>(timeout.count())) == 0) return std::nullopt;
  const int client = ::accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
  if (client >= 0) return client;
  switch (const int error = errno) {
    case EBADF:
    case EFAULT:
    case EINVAL:
    case ENOTSOCK:
      throw std::runtime_error("no more connections can be accepted (" + Reason(error) + "); restart the service");
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      if (!reported_no_room_) {
        std::cerr << "no room for another connection (" << Reason(error)
                  << "), new ones wait; lower --connections, or raise ulimit -n" << std::endl;
      }
      reported_no_room_ = true;
      std::this_thread::sleep_for(kRetryDelay);
      return std::nullopt;
    case EAGAIN:
    case ECONNABORTED:
    case EINTR:
    case EPROTO:
      return std::nullopt;  // only this client's error
    default:                // Linux reports the new connection's own errors here: ENETDOWN, EPERM from a firewall, ...
      std::this_thread::sleep_for(kRetryDelay);
      return std::nullopt;
  }
}

}  // namespace service
