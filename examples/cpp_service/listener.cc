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

constexpr std::chrono::milliseconds kPause{10};  // before an error that may go on is tried again

std::string Reason(int error) { return std::generic_category().message(error); }

std::string Remedy(int error) {
  if (error == EADDRNOTAVAIL) return "name an address of this machine with --host";
  if (error == EACCES) return "choose a --port above 1023";
  return "choose another --port";
}

void Set(int socket, int level, int option) {
  const int on = 1;
  ::setsockopt(socket, level, option, &on, sizeof on);
}

// 0, or why nobody can connect to this address.
int Listen(int socket, const addrinfo& address) {
  // a port whose last connections are still dying, but none that another process listens on: SO_REUSEPORT, httplib's own choice,
  // would share it with a second service
  Set(socket, SOL_SOCKET, SO_REUSEADDR);
  Set(socket, IPPROTO_TCP, TCP_NODELAY);  // what is accepted inherits it
  if (::bind(socket, address.ai_addr, address.ai_addrlen) != 0) return errno;
  // whoever finds no thread free waits here; beyond these, clients time out or are reset
  return ::listen(socket, SOMAXCONN) == 0 ? 0 : errno;
}

}  // namespace

Listener::Listener(const std::string& host, int port) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_STREAM;
  wanted.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int unknown = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wanted, &found);
  if (unknown != 0) {
    const std::string reason = unknown == EAI_SYSTEM ? Reason(errno) : ::gai_strerror(unknown);
    throw std::runtime_error("--host: '" + host + "' is no address (" + reason + "); name one of this machine");
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  int error = EADDRNOTAVAIL;
  for (const addrinfo* each = found; each != nullptr; each = each->ai_next) {
    // not to be waited in by accept(): a client may be gone by then
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

std::optional<int> Listener::Accept(std::chrono::milliseconds moment) {
  pollfd polled{socket_, POLLIN, 0};
  if (::poll(&polled, 1, static_cast<int>(moment.count())) == 0) return std::nullopt;
  const int client = ::accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
  if (client >= 0) return client;
  switch (const int error = errno) {
    case EBADF:
    case EFAULT:
    case EINVAL:
    case ENOTSOCK:
      throw std::runtime_error("no more connections can be accepted (" + Reason(error) + "); start the service again");
    case EMFILE:
    case ENFILE:
    case ENOBUFS:
    case ENOMEM:
      if (!told_) {
        std::cerr << "no room for another connection (" << Reason(error)
                  << "), those that come wait; lower --connections, or raise ulimit -n" << std::endl;
      }
      told_ = true;
      std::this_thread::sleep_for(kPause);
      return std::nullopt;
    case EAGAIN:
    case ECONNABORTED:
    case EINTR:
    case EPROTO:
      return std::nullopt;  // of this client alone
    default:                // Linux tells here what befell the new connection: ENETDOWN, EPERM of a firewall, ...
      std::this_thread::sleep_for(kPause);
      return std::nullopt;
  }
}

}  // namespace service
