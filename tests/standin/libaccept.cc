// Stands in for accept4: each call fails with the next error number of ACCEPT_ERRORS (0: it works); after the last, all work.
#include <dlfcn.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>

extern "C" int accept4(int socket, sockaddr* address, socklen_t* size, int flags) {
  static const char* errors = std::getenv("ACCEPT_ERRORS");
  static const auto real = reinterpret_cast<decltype(&accept4)>(dlsym(RTLD_NEXT, "accept4"));
  if (errors != nullptr && *errors != '\0') {
    char* rest = nullptr;
    const long error = std::strtol(errors, &rest, 10);
    errors = *rest == '\0' ? rest : rest + 1;
    if (error != 0) {
      errno = static_cast<int>(error);
      return -1;
    }
  }
  return real(socket, address, size, flags);
}
