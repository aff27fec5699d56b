// Memory that runs out when a test wants it to.
#pragma once

// Make one allocation of libskipdecode on this thread fail, after `allocations` more have succeeded. Allocations of other
// libraries always succeed: ONNX Runtime crashes if its own fail.
void FailAllocationAfter(int allocations);
// How many more succeed.
int AllocationsLeft();
// Let all succeed again.
void StopFailingAllocations();
