// <metal_simdgroup_matrix>: an 8×8 matrix, two elements of one row in each lane.
#pragma once

namespace msl {

// Counts the matrices that a lane holds: what a kernel needs in registers, if it is compiled as it is written.
template <class T>
struct Held {
#ifdef MSL_CHECKED
  MSL_INLINE Held() {
    uint32_t bytes = msl_current->fragment_bytes += 2 * sizeof(T);
    if (bytes > msl_current->most_fragment_bytes) msl_current->most_fragment_bytes = bytes;
  }
  MSL_INLINE Held(const Held&) : Held() {}
  MSL_INLINE Held& operator=(const Held&) { return *this; }
  MSL_INLINE ~Held() { msl_current->fragment_bytes -= 2 * sizeof(T); }
#endif
};

}  // namespace msl

namespace metal {

template <class T, int Columns, int Rows>
struct simdgroup_matrix;

template <class T>
struct simdgroup_matrix<T, 8, 8> : ::msl::Held<T> {
  MSL_INLINE simdgroup_matrix() { fill(T(__builtin_nanf(""))); }
  // A diagonal matrix.
  MSL_INLINE explicit simdgroup_matrix(T value) {
    bool even = row() == column(), odd = row() == column() + 1;
    set(even ? value : T(0), odd ? value : T(0));
  }
  MSL_INLINE simdgroup_matrix(const simdgroup_matrix& other) { set(other.get(0), other.get(1)); }
  MSL_INLINE simdgroup_matrix& operator=(const simdgroup_matrix& other) {
    set(other.get(0), other.get(1));
    return *this;
  }

  MSL_INLINE vec<T, 2>& thread_elements() { return elements; }
  MSL_INLINE const vec<T, 2>& thread_elements() const { return elements; }

  // The rest is the shim's own; it goes around the sanitizer.
  static MSL_INLINE uint row() { return msl_current->fragment_row; }
  static MSL_INLINE uint column() { return msl_current->fragment_column; }
  MSL_INLINE uint64_t floats() const { return as_type<uint64_t>(float2{float(get(0)), float(get(1))}); }
  MSL_INLINE T get(int i) const { return ::msl::raw<const T>(&elements)[i]; }
  MSL_INLINE void set(T first, T second) {
    ::msl::raw<T>(&elements)[0] = first;
    ::msl::raw<T>(&elements)[1] = second;
  }
  MSL_INLINE void fill(T value) { set(value, value); }

 private:
  vec<T, 2> elements;
};

// Products of float matrices are queued (msl_multiply_accumulate): reading one that waits settles all of them.
template <>
struct simdgroup_matrix<float, 8, 8> : ::msl::Held<float> {
  MSL_INLINE simdgroup_matrix() { initialise(__builtin_nanf(""), __builtin_nanf("")); }
  MSL_INLINE explicit simdgroup_matrix(float value) {
    initialise(row() == column() ? value : 0.0f, row() == column() + 1 ? value : 0.0f);
  }
  MSL_INLINE simdgroup_matrix(const simdgroup_matrix& other) {
    initialise(0, 0);
    msl_copy_matrix(&state, &other.state);
  }
  MSL_INLINE simdgroup_matrix& operator=(const simdgroup_matrix& other) {
    msl_copy_matrix(&state, &other.state);
    return *this;
  }
  MSL_INLINE ~simdgroup_matrix() { forget(); }

  MSL_INLINE vec<float, 2>& thread_elements() {
    settle();
    return *(vec<float, 2>*)state.elements;
  }
  MSL_INLINE const vec<float, 2>& thread_elements() const {
    settle();
    return *(const vec<float, 2>*)state.elements;
  }

  static MSL_INLINE uint row() { return msl_current->fragment_row; }
  static MSL_INLINE uint column() { return msl_current->fragment_column; }
  MSL_INLINE uint64_t floats() const {
    settle();
    return *::msl::raw<const uint64_t>(&state);
  }
  MSL_INLINE float get(int i) const {
    settle();
    return ::msl::raw<const msl_accumulator>(&state)->elements[i];
  }
  MSL_INLINE void set(float first, float second) {
    forget();
    initialise(first, second);
  }
  MSL_INLINE void fill(float value) { set(value, value); }
  MSL_INLINE msl_accumulator* accumulator() { return &state; }
  MSL_INLINE const msl_accumulator* accumulator() const { return &state; }

 private:
  alignas(8) msl_accumulator state;

  MSL_INLINE bool waits() const {
    return __builtin_expect(::msl::raw<const msl_accumulator>(&state)->generation == msl_current->generation, 0);
  }
  MSL_INLINE void settle() const {
    if (waits()) msl_settle_matrices();
  }
  MSL_INLINE void forget() {
    if (waits()) msl_forget_matrix(::msl::raw<const msl_accumulator>(&state)->slot);
  }
  MSL_INLINE void initialise(float first, float second) {
    auto raw_state = ::msl::raw<msl_accumulator>(&state);
    raw_state->elements[0] = first;
    raw_state->elements[1] = second;
    raw_state->generation = 0;
  }
};

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows>
MSL_INLINE simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> matrix;
  matrix.fill(value);
  return matrix;
}
template <class T, int Columns, int Rows = Columns>
MSL_INLINE simdgroup_matrix<T, Columns, Rows> make_diagonal_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, Columns, Rows>(value);
}

}  // namespace metal

namespace msl {

// Where this lane's first element of the tile is, and how far its second one is from that.
template <class P>
struct Fragment {
  P first;
  ulong step;
};
template <class T, class P>
MSL_INLINE Fragment<P> fragment_at(P tile, ulong stride, ::ulong2 origin, bool transposed, bool is_store) {
  typedef metal::simdgroup_matrix<T, 8, 8> matrix;
  tile += origin.y * stride + origin.x;
#ifdef MSL_CHECKED
  msl_access_matrix((const void*)(uintptr_t)tile, stride, sizeof(T), transposed, is_store);
#endif
  ulong row = matrix::row(), column = matrix::column();
  if (transposed) return {tile + column * stride + row, stride};
  return {tile + row * stride + column, 1};
}

}  // namespace msl

namespace metal {

#define MSL_MATRIX_LOAD(space)                                                                             \
  template <class T>                                                                                       \
  MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const space T* tile, ulong stride = 8, \
                                 ulong2 origin = 0, bool transpose = false) {                              \
    auto place = ::msl::fragment_at<T>(tile, stride, origin, transpose, false);                            \
    matrix.set(*::msl::raw<const T>(place.first), *::msl::raw<const T>(place.first + place.step));         \
  }
MSL_MATRIX_LOAD(device)
MSL_MATRIX_LOAD(constant)
MSL_MATRIX_LOAD(threadgroup)

#define MSL_MATRIX_STORE(space)                                                                             \
  template <class T>                                                                                        \
  MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& matrix, space T* tile, ulong stride = 8, \
                                  ulong2 origin = 0, bool transpose = false) {                              \
    T first = matrix.get(0), second = matrix.get(1);                                                        \
    auto place = ::msl::fragment_at<T>(tile, stride, origin, transpose, true);                              \
    *::msl::raw<T>(place.first) = first;                                                                    \
    *::msl::raw<T>(place.first + place.step) = second;                                                      \
  }
MSL_MATRIX_STORE(device)
MSL_MATRIX_STORE(threadgroup)

// d = a · b + c, accumulated in float.
template <class A, class B>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<float, 8, 8>& c) {
  msl_multiply_accumulate(d.accumulator(), a.floats(), b.floats(), c.accumulator());
}
template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                              const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  simdgroup_matrix<float, 8, 8> sum;
  sum.set(float(c.get(0)), float(c.get(1)));
  simdgroup_multiply_accumulate(sum, a, b, sum);
  d.set(D(sum.get(0)), D(sum.get(1)));
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                   const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}

}  // namespace metal
