// The kernel of the rotation of heads.
#include "rotation.cuh"
