// Single module of all kernels, as compiled for devices.
#include "products.cu"
#include "layers.cu"
#include "attention.cu"
#include "delta.cu"
