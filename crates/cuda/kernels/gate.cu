// The kernels of gates.
#include "gate.cuh"
