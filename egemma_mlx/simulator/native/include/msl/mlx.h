// Names that MLX's own prefix defines on a Mac and that the signatures it generates use
// (mlx/backend/metal/kernels/utils.h).
#pragma once

using namespace metal;

typedef half float16_t;
typedef bfloat bfloat16_t;
struct complex64_t;

// Where element `elem` of a row-major enumeration lies in an array with strides (in elements).
template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(IdxT elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * IdxT(strides[i]);
    elem /= shape[i];
  }
  return loc;
}

// The same for (x, y) in the two last dimensions and z over all the others.
template <typename IdxT = int64_t>
METAL_FUNC IdxT elem_to_loc(uint3 elem, constant const int* shape, constant const int64_t* strides, int ndim) {
  IdxT loc = elem.x * IdxT(strides[ndim - 1]) + elem.y * IdxT(strides[ndim - 2]);
  for (int i = ndim - 3; i >= 0; --i) {
    loc += (elem.z % shape[i]) * IdxT(strides[i]);
    elem.z /= shape[i];
  }
  return loc;
}
