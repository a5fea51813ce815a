// Adagrad over one rank's slice of flat dense weights, exchanged through peer memory; see sharded_adagrad.py.
//
// Other ranks' gradients arrive over NVLink, with a latency of a few microseconds, and the kernel should use few
// blocks, to leave multiprocessors to the concurrent GEMMs. Therefore one thread of a block keeps STAGES tiles of all
// its inputs in flight to shared memory, by bulk copies, while the other threads compute and write.
//
// Macros: RANKS, WEIGHTS_BF16 (gradients too, else both fp32), THREADS that compute, STAGES.

#include "hopper.cuh"

constexpr int WIDTH = WEIGHTS_BF16 ? 8 : 4;  // elements of a 16-byte access; a thread has one access in each tile
constexpr u32 INFINITE = 0x7f800000;
constexpr int FP32_BYTES = THREADS * WIDTH * 4, GRAD_BYTES = THREADS * 16;  // per tile
constexpr int STAGE_BYTES = 2 * FP32_BYTES + RANKS * GRAD_BYTES;

struct Arguments {
  float *master, *state;
  const u64 *grads, *workings;  // addresses of all ranks' tensors
  const float* learning_rate;
  const int* stopped;
  u64* bad;
  int flags;
  float eps;
  long long first;  // index of the slice's first element in the workings
  int count;  // pieces of WIDTH elements
};

// Adds elements of a gradient or of weights, in fp32.
__device__ __forceinline__ void add(float (&sum)[WIDTH], const uint4& v) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const u32 word = words[WEIGHTS_BF16 ? i / 2 : i];
    sum[i] += __uint_as_float(!WEIGHTS_BF16 ? word : i % 2 ? word & 0xffff0000u : word << 16);
  }
}

// Called by one thread: loads the block's tiles as stages become free.
__device__ void bring(const Arguments& p, u32 stages, u32 full, u32 empty) {
  const char* grads[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) grads[rank] = reinterpret_cast<const char*>(p.grads[rank]);
  int turn = 0;
  for (long long start = blockIdx.x * THREADS; start < p.count; start += gridDim.x * THREADS, ++turn) {
    const int stage = turn % STAGES, pieces = min((long long)THREADS, p.count - start);
    const u32 to = stages + stage * STAGE_BYTES, barrier = full + 8 * stage;
    if (turn >= STAGES) wait(empty + 8 * stage, turn / STAGES - 1 & 1);
    expect(barrier, pieces * (2 * 4 * WIDTH + 16 * RANKS));
    for (int rank = 0; rank < RANKS; ++rank)
      copy(to + 2 * FP32_BYTES + rank * GRAD_BYTES, grads[rank] + 16 * start, 16 * pieces, barrier);
    copy(to, p.state + WIDTH * start, 4 * WIDTH * pieces, barrier);
    copy(to + FP32_BYTES, p.master + WIDTH * start, 4 * WIDTH * pieces, barrier);
  }
}

__device__ void update(const Arguments& p, u32 stages, u32 full, u32 empty) {
  const float rate = *p.learning_rate;
  char* workings[RANKS];
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank)
    workings[rank] = reinterpret_cast<char*>(p.workings[rank]) + p.first * (16 / WIDTH);
  int turn = 0;
  for (long long start = blockIdx.x * THREADS; start < p.count; start += gridDim.x * THREADS, ++turn) {
    const int stage = turn % STAGES;
    const u32 from = stages + stage * STAGE_BYTES;
    const long long at = start + threadIdx.x;
    wait(full + 8 * stage, turn / STAGES & 1);
    float g[WIDTH], s[WIDTH], w[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) g[i] = 0;
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank)
      add(g, words_at(from + 2 * FP32_BYTES + rank * GRAD_BYTES + 16 * threadIdx.x));
#pragma unroll
    for (int quad = 0; quad < WIDTH / 4; ++quad) {
      const u32 place = from + (threadIdx.x * (WIDTH / 4) + quad) * 16;
      *reinterpret_cast<uint4*>(s + 4 * quad) = words_at(place);
      *reinterpret_cast<uint4*>(w + 4 * quad) = words_at(place + FP32_BYTES);
    }
    // Without the fence, the arrival could overtake pending reads, and the next copy overwrite what they read.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + 8 * stage);
    if (at >= p.count) continue;
    u32 largest = 0;  // of the states' bits, which order like non-negative numbers; Infinity and NaN come last
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      s[i] = __fmaf_rn(g[i], g[i], s[i]);
      w[i] -= __fdiv_rn(rate * g[i], __fsqrt_rn(s[i]) + p.eps);
      largest = max(largest, __float_as_uint(s[i]));
    }
    if (largest >= INFINITE && p.flags > 0) {
      *p.bad = 1;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i)
        if (__float_as_uint(s[i]) >= INFINITE) s[i] = p.state[WIDTH * at + i], w[i] = p.master[WIDTH * at + i];
    }
    uint4 out = *reinterpret_cast<uint4*>(w);
    if (WEIGHTS_BF16)
      out = make_uint4(pack(w[0], w[1]), pack(w[2], w[3]), pack(w[WIDTH - 4], w[WIDTH - 3]),
                       pack(w[WIDTH - 2], w[WIDTH - 1]));
#pragma unroll
    for (int quad = 0; quad < WIDTH / 4; ++quad) {
      reinterpret_cast<float4*>(p.state + WIDTH * at)[quad] = *reinterpret_cast<float4*>(s + 4 * quad);
      reinterpret_cast<float4*>(p.master + WIDTH * at)[quad] = *reinterpret_cast<float4*>(w + 4 * quad);
    }
#pragma unroll
    for (int rank = 0; rank < RANKS; ++rank) *reinterpret_cast<uint4*>(workings[rank] + 16 * at) = out;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32) sharded_adagrad(const __grid_constant__ Arguments p) {
  extern __shared__ unsigned char shared[];
  for (int i = 0; i < p.flags; ++i)
    if (p.stopped[i]) return;
  const u32 stages = static_cast<u32>(__cvta_generic_to_shared(shared)) + 127 & ~127u;
  const u32 full = stages + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, THREADS / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < THREADS)
    update(p, stages, full, empty);
  else if (threadIdx.x == THREADS)
    bring(p, stages, full, empty);
}
