// What generated kernel text is compiled against: CUDA's words, and the emulated instructions.
//
// Functions of namespace emu without a body are in the runtime, which the text is linked with. Those that take
// several registers take pointers to them in a List, made by outs (registers written) and values (registers read).
#pragma once
#include <cstddef>

#ifdef EMU_FAST_MATH  // not for the runtime
#include "functions.h"
#endif
#include "types.h"

#define __device__
#define __host__
#define __global__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) alignas(bytes)

namespace emu {

struct Index { int x, y, z; };
Index thread_index();
Index block_index();
int thread_rank();
uint cluster_rank();

// Shared memory: a static array by its number in the kernel's text, and the dynamic part.
void* shared_array(int number, size_t bytes, size_t alignment);
uchar* dynamic_shared();
uint shared_address(const void* pointer);
template <class T, size_t N> EMU_INLINE T (&shared(int number, size_t alignment))[N] {
  return *reinterpret_cast<T(*)[N]>(shared_array(number, sizeof(T) * N, alignment));
}

template <class T, size_t N> struct List { T item[N]; };
template <class T, class... More> EMU_INLINE List<T*, 1 + sizeof...(More)> outs(T& first, More&... more) {
  return {{&first, &more...}};
}
template <class T, class... More> EMU_INLINE List<T, 1 + sizeof...(More)> values(T first, More... more) {
  return {{first, T(more)...}};
}

// Asynchronous copies.
void cp_async(uint to, const void* from, int bytes, int source_bytes);
EMU_INLINE void cp_async(uint to, const void* from, int bytes) { cp_async(to, from, bytes, bytes); }
void cp_async_commit();
void cp_async_wait(int left);
EMU_INLINE void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait(0);
}
void arrive_after_copies(uint mbarrier, bool counted);
template <bool counted> EMU_INLINE void cp_async_arrive(uint mbarrier) { arrive_after_copies(mbarrier, counted); }
void store_global(void* to, const void* from, int bytes);
template <class T, class Address> EMU_INLINE void st_global(Address to, T value) {
  store_global((void*)to, &value, sizeof(T));
}
template <class T, class Address, class U, size_t N> EMU_INLINE void st_global(Address to, List<U, N> from) {
  List<T, N> list;
  for (size_t i = 0; i < N; ++i) list.item[i] = T(from.item[i]);
  store_global((void*)to, &list, sizeof list);
}
void store_shared(uint to, const void* from, int bytes);
void load_shared(void* to, uint from, int bytes);
template <class T> EMU_INLINE void st_shared(uint to, T value) { store_shared(to, &value, sizeof(T)); }
template <class T, class U, size_t N> EMU_INLINE void st_shared(uint to, List<U, N> from) {
  List<T, N> list;
  for (size_t i = 0; i < N; ++i) list.item[i] = T(from.item[i]);
  store_shared(to, &list, sizeof list);
}
template <class T> EMU_INLINE void ld_shared(T& to, uint from) { load_shared(&to, from, sizeof(T)); }
template <class T, size_t N> EMU_INLINE void ld_shared(List<T*, N> to, uint from) {
  List<T, N> list;
  load_shared(&list, from, sizeof list);
  for (size_t i = 0; i < N; ++i) *to.item[i] = list.item[i];
}

// Matrix instructions of a warp; types are those of the operands.
enum Type { F16, BF16, TF32 };
void load_matrices(uint* const* to, int count, bool transposed, uint address);
void store_matrices(uint address, const uint* from, int count, bool transposed);
void multiply_warp(Type type, int depth, float* const* d, const uint* a, const uint* b, const float* c);
template <bool transposed, size_t N> EMU_INLINE void ldmatrix(List<uint*, N> to, uint address) {
  load_matrices(to.item, N, transposed, address);
}
template <bool transposed, size_t N> EMU_INLINE void stmatrix(uint address, List<uint, N> from) {
  store_matrices(address, from.item, N, transposed);
}
template <Type type, int depth, size_t A, size_t B>
EMU_INLINE void mma(List<float*, 4> d, List<uint, A> a, List<uint, B> b, List<float, 4> c) {
  multiply_warp(type, depth, d.item, a.item, b.item, c.item);
}
EMU_INLINE void cvt_rna_tf32(uint& to, uint from) { to = round_to_tf32(from); }
EMU_INLINE void cvt_f16x2(uint& to, float high, float low) { to = __pack_half2(half(low), half(high)); }
EMU_INLINE void cvt_bf16x2(uint& to, float high, float low) { to = __pack_nv_bfloat162(low, high); }
template <typename T> EMU_INLINE void add_pairs(uint& to, uint one, uint other) {
  T pairs[2][2];
  memcpy(pairs[0], &one, sizeof one);
  memcpy(pairs[1], &other, sizeof other);
  const T sums[2] = {pairs[0][0] + pairs[1][0], pairs[0][1] + pairs[1][1]};
  memcpy(&to, sums, sizeof to);
}
template <typename T> EMU_INLINE void max_pairs(uint& to, uint one, uint other) {  // NaN where either is
  T pairs[2][2], larger[2];
  memcpy(pairs[0], &one, sizeof one);
  memcpy(pairs[1], &other, sizeof other);
  for (int i = 0; i < 2; ++i) {
    const float first = float(pairs[0][i]), second = float(pairs[1][i]);
    larger[i] = first != first || first > second ? pairs[0][i] : pairs[1][i];
  }
  memcpy(&to, larger, sizeof to);
}

// Matrix instructions of a warpgroup.
struct Wgmma { Type type; int columns; uint64_t a, b; int accumulate, scale_a, scale_b, transpose_a, transpose_b; };
constexpr uint64_t IN_REGISTERS = ~uint64_t(0);  // in place of A's descriptor
constexpr int A_REGISTERS = 4;
void issue_wgmma(const Wgmma& instruction, float* const* registers, int count, const uint* const* a);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int left);
template <Type type, int columns, size_t N>
EMU_INLINE void wgmma(List<float*, N> d, uint64_t a, uint64_t b, int p, int sa, int sb, int ta, int tb) {
  static_assert(N == columns / 2, "a thread has half as many registers as the instruction has columns");
  issue_wgmma({type, columns, a, b, p, sa, sb, ta, tb}, d.item, N, nullptr);
}
// The caller's own registers, for the instruction reads them later.
template <class... Registers> EMU_INLINE List<const uint*, sizeof...(Registers)> lent(const Registers&... registers) {
  return {{(const uint*)&registers...}};
}
template <Type type, int columns, size_t N>
EMU_INLINE void wgmma(List<float*, N> d, List<const uint*, A_REGISTERS> a, uint64_t b, int p, int sa, int sb, int tb) {
  static_assert(N == columns / 2, "a thread has half as many registers as the instruction has columns");
  issue_wgmma({type, columns, IN_REGISTERS, b, p, sa, sb, 0, tb}, d.item, N, a.item);
}
void change_registers(int count, bool more);
template <bool more> EMU_INLINE void set_registers(int count) { change_registers(count, more); }
void wait_for_previous();

// Barriers, votes and shuffles.
void sync_block();
void sync_named(int barrier, int threads, bool wait);
void sync_warp(uint mask);
void arrive_at_cluster(bool releases);
template <bool releases> EMU_INLINE void cluster_arrive() { arrive_at_cluster(releases); }
void cluster_wait();
bool elected(uint mask);
uint shuffle(uint mask, uint value, int from, int width);
uint ballot(uint mask, bool vote);
int lane();
EMU_INLINE void elect(bool& leader, uint mask) { leader = elected(mask); }
EMU_INLINE void bar_sync(int barrier) { sync_named(barrier, 0, true); }
EMU_INLINE void bar_sync(int barrier, int threads) { sync_named(barrier, threads, true); }
EMU_INLINE void bar_arrive(int barrier, int threads) { sync_named(barrier, threads, false); }

// mbarriers and TMA. Addresses with a rank in their upper byte (mapa) are another block's of the cluster.
void mbarrier_init(uint address, uint count);
void mbarrier_invalidate(uint address);
void arrive(uint address, uint count, uint expected_bytes, bool arrives);
void try_wait(bool& done, uint address, uint parity, bool blocking);
EMU_INLINE void mbarrier_arrive(uint address) { arrive(address, 1, 0, true); }
EMU_INLINE void mbarrier_arrive(uint address, uint count) { arrive(address, count, 0, true); }
EMU_INLINE void mbarrier_arrive_expect(uint address, uint bytes) { arrive(address, 1, bytes, true); }
EMU_INLINE void mbarrier_expect(uint address, uint bytes) { arrive(address, 0, bytes, false); }
EMU_INLINE void mbarrier_try_wait(bool& done, uint address, uint parity) { try_wait(done, address, parity, true); }
EMU_INLINE void mbarrier_try_wait(bool& done, uint address, uint parity, uint) {
  try_wait(done, address, parity, true);
}
EMU_INLINE void mbarrier_test_wait(bool& done, uint address, uint parity) { try_wait(done, address, parity, false); }
void mapa(uint& to, uint address, uint rank);
void fence_proxy();
void fence_mbarrier_init();
void load_box(uint to, const CUtensorMap& map, const int* corner, int rank, uint mbarrier, uint mask);
void store_box(const CUtensorMap& map, const int* corner, int rank, uint from, bool add);
void bulk_commit();
void wait_for_stores(int left);
template <bool reads_only> EMU_INLINE void bulk_wait(int left) { wait_for_stores(left); }
template <int rank>
EMU_INLINE void tma_load(uint to, const void* map, List<int, rank> corner, uint mbarrier) {
  load_box(to, *(const CUtensorMap*)map, corner.item, rank, mbarrier, 0);
}
template <int rank>
EMU_INLINE void tma_load(uint to, const void* map, List<int, rank> corner, uint mbarrier, uint64_t) {
  tma_load<rank>(to, map, corner, mbarrier);
}
template <int rank>
EMU_INLINE void tma_load_multicast(uint to, const void* map, List<int, rank> corner, uint mbarrier, uint mask) {
  load_box(to, *(const CUtensorMap*)map, corner.item, rank, mbarrier, mask);
}
template <int rank>
EMU_INLINE void tma_load_multicast(uint to, const void* map, List<int, rank> corner, uint mbarrier, uint mask, uint64_t) {
  tma_load_multicast<rank>(to, map, corner, mbarrier, mask);
}
template <int rank, bool add = false>
EMU_INLINE void tma_store(const void* map, List<int, rank> corner, uint from) {
  store_box(*(const CUtensorMap*)map, corner.item, rank, from, add);
}

// Bulk copies without a tensor map, and flags in global memory.
void load_bytes(uint to, const void* from, int bytes, uint mbarrier);
void add_to_flag(int* flag, int value, bool releases);
void add_float(float* to, float value);
void store_flag(int* flag, int value, bool releases);
void load_flag(int& value, const int* flag, bool acquires);
EMU_INLINE void bulk_load(uint to, const void* from, int bytes, uint mbarrier) { load_bytes(to, from, bytes, mbarrier); }
template <bool releases> EMU_INLINE void red_add(int* flag, int value) { add_to_flag(flag, value, releases); }
template <class Address> EMU_INLINE void red_add_float(Address to, float value) { add_float((float*)to, value); }
template <bool releases> EMU_INLINE void st_flag(int* flag, int value) { store_flag(flag, value, releases); }
template <bool acquires> EMU_INLINE void ld_flag(int& value, const int* flag) { load_flag(value, flag, acquires); }

template <class... Ignored> EMU_INLINE void nothing(Ignored...) {}
template <class T, class U> EMU_INLINE void mov(T& to, U from) { to = T(from); }
EMU_INLINE void mov(List<ushort*, 2> to, uint from) { *to.item[0] = ushort(from), *to.item[1] = ushort(from >> 16); }
EMU_INLINE void add(int& to, int left, int right) { to = left + right; }
template <class T> EMU_INLINE void mad_wide(uint64_t& to, int left, int right, T* base) {
  to = uint64_t(base) + int64_t(left) * right;
}
template <class T, class U> EMU_INLINE void selp(T& to, U yes, U no, bool choice) { to = T(choice ? yes : no); }
uint64_t global_timer();
[[noreturn]] void trap();
#define EMU_COMPARISON(name, operation) \
  template <class T, class U> EMU_INLINE void setp_##name(bool& to, T left, U right) { to = left operation T(right); } \
  EMU_INLINE void setp_##name##_and(bool& to, uint left, uint right, bool also) { to = left operation right && also; }
EMU_COMPARISON(eq, ==)
EMU_COMPARISON(ne, !=)
EMU_COMPARISON(lt, <)
EMU_COMPARISON(le, <=)
EMU_COMPARISON(gt, >)
EMU_COMPARISON(ge, >=)
#undef EMU_COMPARISON

}  // namespace emu

// For helper functions; kernels have indices of their own, which are known not to change.
template <emu::Index (*get)(), int emu::Index::*member> struct EmuComponent {
  EMU_INLINE operator int() const { return get().*member; }
};
template <emu::Index (*get)()> struct EmuIndex {
  EmuComponent<get, &emu::Index::x> x;
  EmuComponent<get, &emu::Index::y> y;
  EmuComponent<get, &emu::Index::z> z;
};
static const EmuIndex<emu::thread_index> threadIdx = {};
static const EmuIndex<emu::block_index> blockIdx = {};
extern emu::Index blockDim, gridDim;
extern "C" int printf(const char*, ...);
#define __trap emu::trap
#define __syncthreads emu::sync_block
#define __threadfence() ((void)0)  // releases and acquires order all that is known
template <class T> EMU_INLINE void __stcg(T* to, T value) { *to = value; }
template <class T> EMU_INLINE T __ldcg(const T* from) { return *from; }
EMU_INLINE void __syncwarp(uint mask = 0xffffffffu) { emu::sync_warp(mask); }
EMU_INLINE size_t __cvta_generic_to_shared(const void* pointer) { return emu::shared_address(pointer); }
template <class T> EMU_INLINE T __shfl_sync(uint mask, T value, int from, int width = 32) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "shuffles move values of 16, 32 or 64 bits");
  uint bits[(sizeof(T) + 3) / 4] = {};
  std::memcpy(bits, &value, sizeof(T));
  for (uint& part : bits) part = emu::shuffle(mask, part, from, width);
  std::memcpy(&value, bits, sizeof(T));
  return value;
}
template <class T> EMU_INLINE T __shfl_xor_sync(uint mask, T value, int flip, int width = 32) {
  return __shfl_sync(mask, value, emu::lane() ^ flip, width);
}
template <class T> EMU_INLINE T __shfl_up_sync(uint mask, T value, uint by, int width = 32) {
  int inside = emu::lane() % width;
  return __shfl_sync(mask, value, inside >= int(by) ? inside - int(by) : inside, width);
}
template <class T> EMU_INLINE T __shfl_down_sync(uint mask, T value, uint by, int width = 32) {
  int inside = emu::lane() % width;
  return __shfl_sync(mask, value, inside + int(by) < width ? inside + int(by) : inside, width);
}
EMU_INLINE uint __funnelshift_r(uint low, uint high, uint by) { return uint((uint64_t(high) << 32 | low) >> (by & 31)); }
// Whole warps, as if none of their lanes had taken another way: a shuffle then waits for those that did.
EMU_INLINE uint __activemask() {
  int behind = blockDim.x * blockDim.y * blockDim.z - (emu::thread_rank() & ~31);
  return behind < 32 ? (1u << behind) - 1 : 0xffffffffu;
}
EMU_INLINE uint __ballot_sync(uint mask, int vote) { return emu::ballot(mask, vote); }
EMU_INLINE int __any_sync(uint mask, int vote) { return emu::ballot(mask, vote) != 0; }
EMU_INLINE int __all_sync(uint mask, int vote) { return emu::ballot(mask, !vote) == 0; }
namespace cooperative_groups {
struct Block { int thread_rank() const { return emu::thread_rank(); } };
inline Block this_thread_block() { return {}; }
}  // namespace cooperative_groups
