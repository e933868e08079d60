// Mathematical functions of generated text, as nvcc 13 compiles them with --use_fast_math (EMU_FAST_MATH) or without.
//
// The hardware's approximations (PTX: ex2.approx, lg2.approx, sin.approx, ...) come from tables that nobody publishes.
// Here they are the function itself, rounded as coarsely as PTX allows, of an argument that is rounded as the GPU's is.
// emulator/functions.py lists what text may call; docs/method.md shows its table.
#pragma once
#include "types.h"

namespace emu {

// Flushing (ftz) takes subnormal numbers for 0, before and after. Arithmetic is flushed by the processor's mode
// (machine.h); what looks at bits, or is called where the mode is off, flushes by itself.
EMU_INLINE float flushed(float x) { return !EMU_FAST_MATH || fabsf(x) >= 0x1p-126f || x != x ? x : copysignf(0, x); }

inline float exponential_of_2(float x) { return flushed(exp2f(flushed(x))); }

// lg2.approx: between 1/2 and 2 it is off by 2^-22 at most, however small the logarithm.
inline float logarithm_to_2(float x) {
  float y = log2f(flushed(x));
  return fabsf(y) < 1 ? rintf(y * 0x1p23f) * 0x1p-23f : y;
}

// sin.approx and cos.approx count turns first: a float32 in units of 2^-25, both cut off. So a small argument has few bits,
// and a large one few of its last turn.
inline double turn(float x) {
  double turns = double(flushed(x)) * double(0.15915494f);
  uint64_t bits;
  std::memcpy(&bits, &turns, 8);
  bits &= ~uint64_t(0x1fffffff);
  std::memcpy(&turns, &bits, 8);
  return 6.283185307179586 * remainder(trunc(turns * 0x1p25) * 0x1p-25, 1);
}

}  // namespace emu

// Intrinsics, which text may call under their own names.
// div.approx multiplies by the reciprocal, which is 0 where it would be subnormal: beyond 2^126.
inline float __fdividef(float x, float y) {
  float reciprocal = 1 / emu::flushed(y);
  if (fabsf(reciprocal) < 0x1p-126f) reciprocal = copysignf(0, y);
  return emu::flushed(emu::flushed(x) * reciprocal);
}
inline float __expf(float x) { return emu::exponential_of_2(x * 1.4426950408889634f); }
inline float __exp10f(float x) { return emu::exponential_of_2(x * 3.3219280948873623f); }
inline float __log2f(float x) { return emu::logarithm_to_2(x); }
inline float __logf(float x) { return emu::flushed(__log2f(x) * 0.6931471805599453f); }
inline float __log10f(float x) { return emu::flushed(__log2f(x) * 0.3010299956639812f); }
inline float __powf(float x, float y) { return emu::exponential_of_2(emu::flushed(y) * __log2f(x)); }
inline float __sinf(float x) { return emu::flushed(float(sin(emu::turn(x)))); }
inline float __cosf(float x) { return emu::flushed(float(cos(emu::turn(x)))); }
inline float __tanf(float x) { return __fdividef(__sinf(x), __cosf(x)); }
// tanh.approx: PTX allows an error of 2^-11 of the result, an H200 has one of 2^-16.5. 16 bits, then; subnormals stay.
inline float __tanhf(float x) {
  return fabsf(x) < 0x1p-126f ? x : emu::float_of((emu::bits_of(tanhf(x)) + 0x80) & 0xffffff00);
}

inline float rsqrtf(float x) { return emu::flushed(1 / sqrtf(emu::flushed(x))); }
inline double rsqrt(double x) { return 1 / sqrt(x); }

namespace emu {

// Fast mathematics: `a / b` is compiled as `a / emu::over / b`, so that a division of two float32 is the GPU's.
constexpr struct Over {} over;
template <class T> struct Dividend { T value; };
template <class T> EMU_INLINE Dividend<T> operator/(T value, Over) { return {value}; }
template <class T, class U> EMU_INLINE auto quotient(T a, U b) -> decltype(a / b) { return a / b; }
EMU_INLINE float quotient(float a, float b) { return __fdividef(a, b); }
template <class T, class U> EMU_INLINE auto operator/(Dividend<T> a, U b) -> decltype(quotient(a.value, b)) {
  return quotient(a.value, b);
}

// C's function of flushed numbers, flushed: C's own returns some of them as they are.
template <auto of, class... Numbers> EMU_INLINE float of_flushed(Numbers... x) { return flushed(of(flushed(x)...)); }

// Inline PTX flushes where it says so, whatever nvcc is told.
template <bool flushes> inline void ex2(float& to, float from) {
  double power = exp2(from);
  if (!(power < 0x1p-126)) to = float(power);
  else to = flushes ? 0 : float_of(uint32_t(nearbyint(power * 0x1p149)));
}
inline void tanh_approx(float& to, float from) { to = __tanhf(from); }

}  // namespace emu

// CUDA's own in 16 bits: float32 for half, float64 for bfloat16, rounded once.
#define EMU_HALF(name, of) inline half name(half x) { return emu::narrowed<half>(of(emu::widened(x))); }
#define EMU_BFLOAT16(name, of) \
  inline nv_bfloat16 name(nv_bfloat16 x) { return emu::narrowed<nv_bfloat16>(of(emu::widened(x))); }
#define EMU_16_BITS(name, half_of, bfloat16_of) EMU_HALF(name, half_of) EMU_BFLOAT16(name, bfloat16_of)
EMU_16_BITS(hexp, expf, exp)
EMU_16_BITS(hexp2, exp2f, exp2)
EMU_16_BITS(hexp10, exp10f, exp10)
EMU_16_BITS(hlog, logf, log)
EMU_16_BITS(hlog2, log2f, log2)
EMU_16_BITS(hlog10, log10f, log10)
EMU_16_BITS(hsqrt, sqrtf, sqrt)
EMU_16_BITS(hrsqrt, rsqrtf, rsqrt)
EMU_16_BITS(hrcp, 1 /, 1 /)
EMU_16_BITS(hfloor, floorf, floor)
EMU_16_BITS(hceil, ceilf, ceil)
EMU_16_BITS(hrint, rintf, rint)
EMU_16_BITS(htrunc, truncf, trunc)
EMU_16_BITS(__habs, fabsf, fabs)
EMU_HALF(hsin, sinf)
EMU_HALF(hcos, cosf)

#if EMU_FAST_MATH
#define expf __expf
#define exp2f emu::exponential_of_2
#define exp10f __exp10f
#define logf __logf
#define log2f __log2f
#define log10f __log10f
#define powf __powf
#define sinf __sinf
#define cosf __cosf
#define tanf __tanf
#define tanhf __tanhf
#define acosf emu::of_flushed<::acosf>
#define acoshf emu::of_flushed<::acoshf>
#define asinf emu::of_flushed<::asinf>
#define asinhf emu::of_flushed<::asinhf>
#define atan2f emu::of_flushed<::atan2f>
#define atanf emu::of_flushed<::atanf>
#define atanhf emu::of_flushed<::atanhf>
#define ceilf emu::of_flushed<::ceilf>
#define coshf emu::of_flushed<::coshf>
#define erff emu::of_flushed<::erff>
#define fabsf emu::of_flushed<::fabsf>
#define floorf emu::of_flushed<::floorf>
#define fmaf emu::of_flushed<::fmaf>
#define fmaxf emu::of_flushed<::fmaxf>
#define fminf emu::of_flushed<::fminf>
#define fmodf emu::of_flushed<::fmodf>
#define hypotf emu::of_flushed<::hypotf>
#define log1pf emu::of_flushed<::log1pf>
#define sinhf emu::of_flushed<::sinhf>
#endif

// Those in 16 bits that call a function of float32, as CUDA's headers and TVM's text define them.
#undef EMU_BFLOAT16
#define EMU_BFLOAT16(name, of) inline nv_bfloat16 name(nv_bfloat16 x) { return nv_bfloat16(of(float(x))); }
EMU_BFLOAT16(hsin, sinf)
EMU_BFLOAT16(hcos, cosf)
EMU_16_BITS(htanh, tanhf, __tanhf)
EMU_16_BITS(htan, tanf, tanf)
EMU_16_BITS(hatan, atanf, atanf)
EMU_16_BITS(herf, erff, erff)
inline half hpow(half x, half y) { return half(powf(x, y)); }
inline nv_bfloat16 hpow(nv_bfloat16 x, nv_bfloat16 y) { return nv_bfloat16(powf(x, y)); }
#undef EMU_16_BITS
#undef EMU_BFLOAT16
#undef EMU_HALF

template <class T> EMU_INLINE T max(T a, T b) { return a > b ? a : b; }
template <class T> EMU_INLINE T min(T a, T b) { return a < b ? a : b; }
EMU_INLINE int max(int a, int b) { return a > b ? a : b; }  // of an int and a narrower number, as CUDA has it
EMU_INLINE int min(int a, int b) { return a < b ? a : b; }
EMU_INLINE float max(float a, float b) { return fmaxf(a, b); }  // of a number and NaN, the number
EMU_INLINE float min(float a, float b) { return fminf(a, b); }
EMU_INLINE double max(double a, double b) { return fmax(a, b); }
EMU_INLINE double min(double a, double b) { return fmin(a, b); }
