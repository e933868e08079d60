// The kernels of harness/microbench.py. Each does one thing in a long loop, and leaves in `sink` a value that
// can only be right if the loop ran. TVM includes this text once per kernel, hence the guard.
#ifndef LADDER_PROBES
#define LADDER_PROBES

namespace probe {

constexpr int kRingBytes = 32768;  // shared memory of the probes that copy: one block's, static
constexpr int kSlotBytes = 4096;   // 256 threads of 16 bytes
constexpr int kChains = 16;        // independent multiply-adds of a thread: four times their latency in cycles

__device__ __forceinline__ long long nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Cycles and nanoseconds of block 0 from construction to stop().
struct Stopwatch {
  long long cycle = clock64(), time = nanoseconds();
  __device__ __forceinline__ void stop(int64_t* marks) const {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      marks[0] = clock64() - cycle;
      marks[1] = nanoseconds() - time;
    }
  }
};

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy_async(unsigned to, const int4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ int total(int4 v) { return v.x + v.y + v.z + v.w; }

// Every thread keeps kDepth copies of 16 bytes under way, without ever meeting another thread.
template <int kDepth>
__device__ __forceinline__ int stream(char* ring, const int4* source, int steps) {
  const char* own = ring + threadIdx.x * 16;
  const unsigned slot = shared_address(own);
  const int stride = gridDim.x * blockDim.x;
  const int4* from = source + blockIdx.x * blockDim.x + threadIdx.x;
  for (int ahead = 0; ahead < kDepth; ++ahead) {
    if (ahead < steps) copy_async(slot + ahead * kSlotBytes, from + static_cast<long long>(ahead) * stride);
    commit();
  }
  int sum = 0, place = 0;
  for (int step = 0; step < steps; ++step) {
    wait_for_all_but<kDepth - 1>();
    sum += total(*reinterpret_cast<const int4*>(own + place));
    if (step + kDepth < steps) copy_async(slot + place, from + static_cast<long long>(step + kDepth) * stride);
    commit();
    place = place + kSlotBytes == kDepth * kSlotBytes ? 0 : place + kSlotBytes;
  }
  wait_for_all_but<0>();
  return sum;
}

// One mma.sync instruction: C[16, 8] += A[16, k] · B[k, 8], fragments in registers, sums in float32.
struct MmaF16 {
  static __device__ __forceinline__ void issue(float (&c)[4], const int (&a)[4], const int (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

struct MmaTf32 {
  static __device__ __forceinline__ void issue(float (&c)[4], const int (&a)[4], const int (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

constexpr int kFragments = 4;  // of A in a warp's registers, and of B at the most: as many products as pairs of them

// Every warp multiplies each of its fragments of A with kColumns of B, `steps` times; a lane's sum of all it has.
template <class Mma, int kColumns>
__device__ __forceinline__ float products(const int* source, int steps) {
  const int* from = source + threadIdx.x / 32 * kFragments * 32 * 6;
  int a[kFragments][4], b[kColumns][2];
  float c[kFragments][kColumns][4] = {};
  for (int i = 0; i < kFragments * 4; ++i) a[i / 4][i % 4] = from[(i / 4 * 32 + threadIdx.x % 32) * 4 + i % 4];
  from += kFragments * 32 * 4;
  for (int j = 0; j < kColumns * 2; ++j) b[j / 2][j % 2] = from[(j / 2 * 32 + threadIdx.x % 32) * 2 + j % 2];
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int product = 0; product < kFragments * kColumns; ++product)
      Mma::issue(c[product / kColumns][product % kColumns], a[product / kColumns], b[product % kColumns]);
  }
  float sum = 0;
  for (int i = 0; i < kFragments * kColumns * 4; ++i) sum += c[i / 4 / kColumns][i / 4 % kColumns][i % 4];
  return sum;
}

// The same with 1, 2 or 4 fragments of B; leaves each lane's sum as the bits of a float.
template <class Mma>
__device__ __forceinline__ void multiply(const int* source, int* sink, int steps, int columns) {
  float sum = 0;
  switch (columns) {
    case 1: sum = products<Mma, 1>(source, steps); break;
    case 2: sum = products<Mma, 2>(source, steps); break;
    case 4: sum = products<Mma, 4>(source, steps); break;
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_int(sum);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// wgmma's descriptor of rows of 128 bytes, K-major, 128-byte swizzle: eight rows are 1024 bytes.
__device__ __forceinline__ unsigned long long descriptor(const int4* rows) {
  return 1ull << 62 | (1024ull >> 4) << 32 | 1ull << 16 | (shared_address(rows) & 0x3FFFF) >> 4;
}

#define LADDER_TEN(tens)                                                                                  \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens    \
  "7, %" #tens "8, %" #tens "9, "
#define LADDER_EIGHT(c, i)                                                                                \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
      "+f"(c[i + 7])
#define LADDER_THIRTY_TWO(c, i) \
  LADDER_EIGHT(c, i), LADDER_EIGHT(c, i + 8), LADDER_EIGHT(c, i + 16), LADDER_EIGHT(c, i + 24)

// C[64, 256] += A[64, 16] · B[16, 256], both operands in shared memory.
__device__ __forceinline__ void wgmma(float (&c)[128], unsigned long long a, unsigned long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " LADDER_TEN(1)
          LADDER_TEN(2) LADDER_TEN(3) LADDER_TEN(4) LADDER_TEN(5) LADDER_TEN(6) LADDER_TEN(7) LADDER_TEN(8)
              LADDER_TEN(9) LADDER_TEN(10) LADDER_TEN(11)
      "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, 0, 0;"
      : LADDER_THIRTY_TWO(c, 0), LADDER_THIRTY_TWO(c, 32), LADDER_THIRTY_TWO(c, 64), LADDER_THIRTY_TWO(c, 96)
      : "l"(a), "l"(b));
}

#endif

}  // namespace probe

// One thread follows `steps` links, each the index of the next; past the first-level cache.
__device__ void chase(const int* source, int* sink, int64_t*, int first, int steps, int, int) {
  int at = first;
#pragma unroll 8
  for (int step = 0; step < steps; ++step) at = __ldcg(source + at);
  sink[0] = at;
}

// The same in shared memory: a ring of 1024 words, each the address of the 33rd after it.
__device__ void chase_shared(const int*, int* sink, int64_t*, int, int steps, int, int) {
  __shared__ unsigned next[1024];
  const unsigned base = probe::shared_address(next);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) next[i] = base + (i + 33) % 1024 * 4;
  __syncthreads();
  unsigned at = base;
#pragma unroll 16
  for (int step = 0; step < steps; ++step) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at) : : "memory");
  sink[0] = (at - base) / 4;
}

// One thread's dependent multiply-adds: x = x·1 + 1, the one known only at run time.
__device__ void fma_chain(const int*, int* sink, int64_t*, int first, int steps, int width, int) {
  float x = first;
  const float one = width;
#pragma unroll 32
  for (int step = 0; step < steps; ++step) x = __fmaf_rn(x, one, one);
  sink[0] = static_cast<int>(x);
}

// Independent multiply-adds in registers; each thread leaves the sum of its chains.
__device__ void fma_many(const int*, int* sink, int64_t* marks, int first, int steps, int width, int) {
  float x[probe::kChains];
  const float one = width;
  for (int chain = 0; chain < probe::kChains; ++chain) x[chain] = first + static_cast<int>(threadIdx.x) + chain;
  const probe::Stopwatch watch;
#pragma unroll 16
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int chain = 0; chain < probe::kChains; ++chain) x[chain] = __fmaf_rn(x[chain], one, one);
  }
  __syncthreads();
  watch.stop(marks);
  int sum = 0;
  for (int chain = 0; chain < probe::kChains; ++chain) sum += static_cast<int>(x[chain]);
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// All warps load 16 bytes a lane, neighbours from neighbouring places; each thread leaves the sum of the first words.
__device__ void read_shared(const int* source, int* sink, int64_t* marks, int, int steps, int, int) {
  __shared__ float4 data[2048];
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) {
    const float value = static_cast<float>(source[i] & 7);
    data[i] = make_float4(value, value, value, value);
  }
  __syncthreads();
  const probe::Stopwatch watch;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int step = 0; step < steps; ++step) {
    const float4* at = data + (threadIdx.x + step * 32) % 1024;
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      const float4 v = at[part * 128];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
  }
  __syncthreads();
  watch.stop(marks);
  const bool alike = sum.x == sum.y && sum.x == sum.z && sum.x == sum.w;
  sink[blockIdx.x * blockDim.x + threadIdx.x] = alike ? static_cast<int>(sum.x) : -1;
}

__device__ void meet(const int*, int* sink, int64_t*, int, int steps, int, int) {
  int met = 0;
#pragma unroll 8
  for (; met < steps; ++met) __syncthreads();
  sink[blockIdx.x * blockDim.x + threadIdx.x] = met;
}

__device__ void nothing(const int*, int* sink, int64_t*, int, int steps, int, int) {
  if (steps < 0) sink[0] = steps;
}

// The first `count` vectors of 16 bytes, from source to sink.
__device__ void copy(const int* source, int* sink, int64_t*, int, int, int, int count) {
  const int4* from = reinterpret_cast<const int4*>(source);
  int4* to = reinterpret_cast<int4*>(sink);
  const int stride = gridDim.x * blockDim.x;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    const int4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
    to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
  }
  for (; i < count; i += stride) to[i] = from[i];
}

// The first `count` vectors, `steps` times, past the first-level cache; each thread leaves the sum of its words.
__device__ void read(const int* source, int* sink, int64_t*, int, int steps, int, int count) {
  const int4* from = reinterpret_cast<const int4*>(source);
  const int stride = gridDim.x * blockDim.x, own = blockIdx.x * blockDim.x + threadIdx.x;
  int sum = 0;
  for (int step = 0; step < steps; ++step) {
    int i = own;
    for (; i + 3 * stride < count; i += 4 * stride) {
      const int4 a = __ldcg(from + i), b = __ldcg(from + i + stride);
      const int4 c = __ldcg(from + i + 2 * stride), d = __ldcg(from + i + 3 * stride);
      sum += probe::total(a) + probe::total(b) + probe::total(c) + probe::total(d);
    }
    for (; i < count; i += stride) sum += probe::total(__ldcg(from + i));
  }
  sink[own] = sum;
}

// cp.async of one tile of `width` vectors a thread, wait for all of it, meet: again and again. Tile n lies at
// n·40503 modulo the number of tiles, so that nothing foresees the next. Leaves sums of each first word.
__device__ void round_trip(const int* source, int* sink, int64_t*, int first, int steps, int width, int count) {
  __shared__ __align__(16) char ring[probe::kRingBytes];
  const int4* from = reinterpret_cast<const int4*>(source);
  const unsigned tile = width * blockDim.x, tiles = count / tile;
  const unsigned slot = probe::shared_address(ring + threadIdx.x * 16);
  int sum = 0;
  for (int step = 0; step < steps; ++step) {
    const unsigned at = (first + step * gridDim.x + blockIdx.x) * 40503u % tiles;
    for (int part = 0; part < width; ++part)
      probe::copy_async(slot + part * blockDim.x * 16, from + at * tile + part * blockDim.x + threadIdx.x);
    probe::commit();
    probe::wait_for_all_but<0>();
    __syncthreads();
    sum += *reinterpret_cast<volatile int*>(ring + threadIdx.x * 16);
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// `width` copies of 16 bytes under way in each of 256 threads, `steps` of them each; leaves sums of all words.
__device__ void stream_async(const int* source, int* sink, int64_t*, int, int steps, int width, int) {
  __shared__ __align__(16) char ring[probe::kRingBytes];
  const int4* from = reinterpret_cast<const int4*>(source);
  int sum = -1;
  switch (width) {
    case 1: sum = probe::stream<1>(ring, from, steps); break;
    case 2: sum = probe::stream<2>(ring, from, steps); break;
    case 3: sum = probe::stream<3>(ring, from, steps); break;
    case 4: sum = probe::stream<4>(ring, from, steps); break;
    case 6: sum = probe::stream<6>(ring, from, steps); break;
    case 8: sum = probe::stream<8>(ring, from, steps); break;
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Warps that only issue mma.sync on what they have in registers.
__device__ void mma_f16(const int* source, int* sink, int64_t*, int, int steps, int width, int) {
  probe::multiply<probe::MmaF16>(source, sink, steps, width);
}

__device__ void mma_tf32(const int* source, int* sink, int64_t*, int, int steps, int width, int) {
  probe::multiply<probe::MmaTf32>(source, sink, steps, width);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Up to two warpgroups multiply 64 rows each of A[128, 64] with B[256, 64]ᵀ, `steps` times: four instructions in a
// group, one group under way while the next is issued. Leaves each thread's sum as the bits of a float.
__device__ void wgmma_f16(const int* source, int* sink, int64_t*, int, int steps, int, int) {
  constexpr int kRows = 128, kColumns = 256, kPieces = 8, kGroupRows = 64;  // eight pieces of 16 bytes are a row
  __shared__ __align__(1024) int4 tiles[(kRows + kColumns) * kPieces];
  for (int i = threadIdx.x; i < (kRows + kColumns) * kPieces; i += blockDim.x)
    tiles[i ^ i / kPieces % kPieces] = reinterpret_cast<const int4*>(source)[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const unsigned long long a = probe::descriptor(tiles + threadIdx.x / 128 * kGroupRows * kPieces);
  const unsigned long long b = probe::descriptor(tiles + kRows * kPieces);
  float c[128];
  for (int i = 0; i < 128; ++i) c[i] = 0;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) probe::wgmma(c, a + 2 * part, b + 2 * part);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  float sum = 0;
  for (int i = 0; i < 128; ++i) {
    asm volatile("" : "+f"(c[i])::"memory");  // read after the wait
    sum += c[i];
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_int(sum);
}

#endif

#endif  // LADDER_PROBES
