// Memory that runs out when a test wants it to.
#pragma once

// How many allocations of libskipdecode on this thread go through before one fails, once; below 0: all do. Others always do: ONNX
// Runtime crashes where its own fail.
extern thread_local int allocations_left;
