// Why ONNX Runtime failed, which it says in words alone, as an error with what to do. As runtime/engines/ort.py.
#pragma once

#include <string>

#include "error.h"

namespace skd {

// An engine, `where` its file, could not be loaded: SKD_ERROR_BUNDLE; SKD_ERROR_TARGET, SKD_ERROR_CAPACITY where it is not the
// file's fault.
Error LoadFailure(const std::string& said, const std::string& where);

// An engine, `where` its file, ended before its run did: SKD_ERROR_CAPACITY where there was no memory left; else
// SKD_ERROR_TARGET `on_gpu`, and SKD_ERROR_INTERNAL on a CPU.
Error RunFailure(const std::string& said, bool on_gpu, const std::string& where);

// What a user is told of the words: ONNX Runtime's own log, which has them too, is off.
std::string Reason(const std::string& said);

}  // namespace skd
