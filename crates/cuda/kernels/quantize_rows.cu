// The kernel that quantises rows to 8 bits.
#include "quantize_rows.cuh"
