// Memory that runs out when a test wants it to.
#pragma once

// After so many more allocations of libskipdecode on this thread one fails. Others never do: ONNX Runtime crashes where its own
// fail.
void FailAllocationAfter(int allocations);
// How many more go through.
int AllocationsLeft();
// All go through again.
void LetAllocationsBe();
