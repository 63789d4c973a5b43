// One module of all kernels: what is compiled for devices.
#include "products.cu"
#include "layers.cu"
#include "attention.cu"
#include "delta.cu"
