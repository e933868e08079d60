// CUDA's number and vector types for a host compiler: what generated kernel text names.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

// C's own <math.h>: libstdc++'s takes as long to read as the rest of a kernel to compile.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

// What a kernel calls is compiled into it, so that a place in the code is a line of the kernel at any optimisation.
#define EMU_INLINE inline __attribute__((always_inline))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

// The bounds of the library that this is compiled into: hidden, as the program that loads it has an _end, too, far away.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;

namespace emu {

// Where a library's code and constants lie.
struct Library {
  const char *first, *end;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// IEEE half to float. A kernel's float32 may be flushed, so that no step of it is subnormal.
inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) return float_of(sign | bits_of(float(rest) * 0x1p-24f));
  return float_of(sign | ((rest << 13) + 0x38000000));
}

// Round to nearest, ties to even, as cvt.rn.f16.f32.
inline uint16_t float_to_half(float x) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return uint16_t(0x7fff);
  if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (rest < 0x38800000)  // subnormal: the addition rounds at the right place
    return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
  return uint16_t(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

inline float bfloat16_to_float(uint16_t b) { return float_of(uint32_t(b) << 16); }

inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// bfloat16 to double and back: none of its numbers is subnormal there, as they are in float32, which may be flushed.
inline double bfloat16_to_double(uint16_t b) {
  if (b & 0x7f80) return double(bfloat16_to_float(b));
  double size = (b & 0x7f) * 0x1p-133;
  return b & 0x8000 ? -size : size;
}

inline uint16_t double_to_bfloat16(double x) {
  if (!(fabs(x) < 0x1p-126)) return float_to_bfloat16(float(x));
  return uint16_t((__builtin_signbit(x) ? 0x8000 : 0) | int(nearbyint(fabs(x) * 0x1p133)));
}

// Bytes of 8-bit floating point: a sign, ``exponent`` bits, the rest mantissa. e5m2 is the upper half of a float16; e4m3
// has no infinity, and NaN is all ones alone.
inline float e5m2_to_float(uint8_t x) { return half_to_float(uint16_t(x << 8)); }
inline float e4m3_to_float(uint8_t x) {
  if ((x & 0x7f) == 0x7f) return float_of(0x7fffffff);
  if (!(x & 0x78)) return float_of(uint32_t(x & 0x80) << 24 | bits_of(float(x & 0x7) * 0x1p-9f));
  return float_of(uint32_t(x & 0x80) << 24 | ((uint32_t(x & 0x7f) << 20) + 0x3c000000));
}

// To the nearest such number, ties to even, and to the largest where it is beyond (saturating, as CUDA's constructors).
inline uint8_t float_to_fp8(float x, int mantissa, float largest, float (*value)(uint8_t)) {
  uint8_t sign = bits_of(x) >> 31 << 7;
  float size = fabsf(x);
  if (size != size) return sign | 0x7f;
  if (size >= largest) size = largest;
  int exponent;
  frexpf(size, &exponent);
  float unit = ldexpf(1, (exponent < (mantissa == 3 ? -5 : -13) ? (mantissa == 3 ? -5 : -13) : exponent) - 1 - mantissa);
  float rounded = rintf(size / unit) * unit;
  uint8_t low = 0, high = 0x7f;
  while (high - low > 1) (value((low + high) / 2) <= rounded ? low : high) = (low + high) / 2;
  return sign | low;
}
inline uint8_t float_to_e4m3(float x) { return float_to_fp8(x, 3, 448, e4m3_to_float); }
inline uint8_t float_to_e5m2(float x) { return float_to_fp8(x, 2, 57344, e5m2_to_float); }

// A float32 operand rounded to TF32, half away from zero, as cvt.rna.tf32.f32.
inline uint32_t round_to_tf32(uint32_t bits) {
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & 0xffffe000;
}

}  // namespace emu

struct __half {
  uint16_t bits;
  __half() = default;
  EMU_INLINE __half(float x) : bits(emu::float_to_half(x)) {}
  EMU_INLINE operator float() const volatile { return emu::half_to_float(bits); }
  __half& operator=(const __half&) = default;
  EMU_INLINE void operator=(const __half& x) volatile { bits = x.bits; }
  template <class T> EMU_INLINE void operator=(const volatile T& x) volatile { bits = __half(x).bits; }
};

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  EMU_INLINE nv_bfloat16(float x) : bits(emu::float_to_bfloat16(x)) {}
  EMU_INLINE operator float() const volatile { return emu::bfloat16_to_float(bits); }
  nv_bfloat16& operator=(const nv_bfloat16&) = default;
  EMU_INLINE void operator=(const nv_bfloat16& x) volatile { bits = x.bits; }
  template <class T> EMU_INLINE void operator=(const volatile T& x) volatile { bits = nv_bfloat16(x).bits; }
};

#define EMU_FP8(name, kind)                                              \
  struct name {                                                          \
    uint8_t __x;                                                         \
    name() = default;                                                    \
    EMU_INLINE explicit name(float x) : __x(emu::float_to_##kind(x)) {}  \
    EMU_INLINE operator float() const { return emu::kind##_to_float(__x); } \
  };
EMU_FP8(__nv_fp8_e4m3, e4m3)
EMU_FP8(__nv_fp8_e5m2, e5m2)
#undef EMU_FP8
typedef __nv_fp8_e4m3 fp8_e4_t;
typedef __nv_fp8_e5m2 fp8_e5_t;

namespace emu {

// The type in which numbers of 16 bits are added, multiplied, divided and compared before they are rounded.
inline float widened(__half x) { return x; }
inline double widened(nv_bfloat16 x) { return bfloat16_to_double(x.bits); }
template <class T> T narrowed(float x) { return T(x); }
template <class T> T narrowed(double x) {
  T made;
  made.bits = double_to_bfloat16(x);
  return made;
}

}  // namespace emu

// Half-precision arithmetic is rounded after every operation; the types must be known, for whole numbers convert too.
template <class T, class Made> struct EmuHalfOnly {};
template <class Made> struct EmuHalfOnly<__half, Made> { typedef Made type; };
template <class Made> struct EmuHalfOnly<nv_bfloat16, Made> { typedef Made type; };
#define EMU_OPERATOR(op)                                                                 \
  template <class T> EMU_INLINE typename EmuHalfOnly<T, T>::type operator op(T x, T y) { \
    return emu::narrowed<T>(emu::widened(x) op emu::widened(y));                         \
  }
EMU_OPERATOR(+)
EMU_OPERATOR(-)
EMU_OPERATOR(*)
EMU_OPERATOR(/)
#undef EMU_OPERATOR
#define EMU_OPERATOR(op)                                                                    \
  template <class T> EMU_INLINE typename EmuHalfOnly<T, bool>::type operator op(T x, T y) { \
    return emu::widened(x) op emu::widened(y);                                              \
  }
EMU_OPERATOR(==)
EMU_OPERATOR(!=)
EMU_OPERATOR(<)
EMU_OPERATOR(<=)
EMU_OPERATOR(>)
EMU_OPERATOR(>=)
#undef EMU_OPERATOR
template <class T> EMU_INLINE typename EmuHalfOnly<T, T>::type operator-(T x) { return T(-float(x)); }

typedef __half half;
typedef nv_bfloat16 __nv_bfloat16;

namespace emu {

// A vector is one access, as on the GPU: the compiler must not take it apart, so that it is seen to be aligned.
template <size_t bytes> struct Whole;
template <> struct Whole<2> { typedef uint16_t type __attribute__((may_alias)); };
template <> struct Whole<4> { typedef uint32_t type __attribute__((may_alias)); };
template <> struct Whole<8> { typedef uint64_t type __attribute__((may_alias)); };
template <> struct Whole<16> { typedef uint32_t type __attribute__((may_alias, vector_size(16))); };
template <size_t bytes> EMU_INLINE void copy_whole(void* to, const void* from) {
  constexpr size_t step = bytes < 16 ? bytes : 16;
  typedef typename Whole<step>::type Type;
  for (size_t i = 0; i < bytes / step; ++i) ((Type*)to)[i] = ((const Type*)from)[i];
}

}  // namespace emu

#define EMU_VECTOR(T, name, align, members, parameters, values)                        \
  struct alignas(align) name {                                                         \
    T members;                                                                         \
    name() = default;                                                                  \
    EMU_INLINE name parameters : values {}                                             \
    EMU_INLINE name(const name& other) { emu::copy_whole<sizeof(name)>(this, &other); }\
    EMU_INLINE name& operator=(const name& other) {                                    \
      emu::copy_whole<sizeof(name)>(this, &other);                                     \
      return *this;                                                                    \
    }                                                                                  \
  };
#define EMU_VECTORS(T, name, align2, align4)                                           \
  EMU_VECTOR(T, name##2, align2, EMU_LIST(x, y), (T x, T y), EMU_LIST(x(x), y(y)))     \
  EMU_VECTOR(T, name##4, align4, EMU_LIST(x, y, z, w), (T x, T y, T z, T w),           \
             EMU_LIST(x(x), y(y), z(z), w(w)))                                         \
  EMU_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                       \
  EMU_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define EMU_LIST(...) __VA_ARGS__
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(double, double, 16, 16)
EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(uchar, uchar, 2, 4)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(ushort, ushort, 4, 8)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(long long, longlong, 16, 16)
EMU_VECTORS(uint, uint, 8, 16)
EMU_VECTORS(half, half, 4, 8)
EMU_VECTORS(nv_bfloat16, nv_bfloat16, 4, 8)
#undef EMU_VECTORS

// Two and four numbers of 8 bits, which CUDA makes of floats and makes floats of.
#define EMU_FP8_VECTORS(T, kind)                                                                                     \
  EMU_VECTOR(T, __nv_fp8x2_##kind, 2, EMU_LIST(x, y), EMU_LIST((float2 v)), EMU_LIST(x(v.x), y(v.y)))                \
  EMU_VECTOR(T, __nv_fp8x4_##kind, 4, EMU_LIST(x, y, z, w), EMU_LIST((float4 v)),                                    \
             EMU_LIST(x(v.x), y(v.y), z(v.z), w(v.w)))
EMU_FP8_VECTORS(__nv_fp8_e4m3, e4m3)
EMU_FP8_VECTORS(__nv_fp8_e5m2, e5m2)
#undef EMU_FP8_VECTORS
#undef EMU_VECTOR
#undef EMU_LIST

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF double(INFINITY)
#define CUDART_NAN double(NAN)
EMU_INLINE half __float2half(float x) { return half(x); }
EMU_INLINE half __float2half_rn(float x) { return half(x); }
EMU_INLINE float __half2float(half x) { return x; }
EMU_INLINE nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
EMU_INLINE nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
EMU_INLINE float __bfloat162float(nv_bfloat16 x) { return x; }
EMU_INLINE uint __pack_half2(half x, half y) { return uint(y.bits) << 16 | x.bits; }
EMU_INLINE uint __pack_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return uint(y.bits) << 16 | x.bits; }

// What cuTensorMapEncodeTiled encodes: element i of dimension d lies strides[d] bytes from element i - 1.
struct CUtensorMap {
  uchar* base;
  int element_bytes, rank, swizzle;
  int64_t dims[5], strides[5], box[5];
};
