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

#endif  // LADDER_PROBES
