// Turns ONNX Runtime's messages, which are all that tells its failures apart, into errors that say what to do. As in
// runtime/engines/ort.py.
#pragma once

#include <string>

#include "error.h"

namespace skd {

// The error for an engine that could not be loaded from the file `where`: SKD_ERROR_BUNDLE, or SKD_ERROR_TARGET or
// SKD_ERROR_CAPACITY if that is not the file's fault. `message`: ONNX Runtime's message.
Error LoadFailure(const std::string& message, const std::string& where);

// The error for an engine, loaded from the file `where`, whose run failed: SKD_ERROR_CAPACITY if it ran out of memory,
// otherwise SKD_ERROR_TARGET on a GPU and SKD_ERROR_INTERNAL on a CPU.
Error RunFailure(const std::string& message, bool on_gpu, const std::string& where);

// What an error quotes of ONNX Runtime's message, because ONNX Runtime's own log is off: the first line, without the middle of
// one that is long.
std::string Reason(const std::string& message);

}  // namespace skd
