// A product of two 8-bit matrices, for Hopper (sm_90a); see fp8.py.
//
// out = (a @ b.T) * unscale, with RELU relu(that + bias); a: [batch, depth], b: [width, depth]; out: bf16
// [batch, width], or scaled 8-bit values, plain and transposed. One block computes one tile of 128 x 128: each of two
// warpgroups multiplies 64 of its rows, one warp loads the factors. The tensor cores accumulate with some 14 bits of
// mantissa, so their sum over a depth of PROMOTE * 128 is added to an fp32 sum.
//
// Macros: FACTOR and OUTPUT, the formats of a and of the output, and RELU. b is in e4m3.

#include "hopper.cuh"

constexpr int TILE = 128, DEPTH = 128, STAGES = 6, PROMOTE = 4;
constexpr int FACTOR_BYTES = TILE * DEPTH, PIECE = 64 * 64 * 2;
constexpr Format A_FORMAT = Format(FACTOR), OUT_FORMAT = Format(OUTPUT);

struct Arguments {
  TensorMap a, b;
  u16* out;
  u8 *quantised, *transposed;
  const u16* bias;
  u64* tally;
  float scale, unscale;
  u32 limit;
  int transposed_stride, batch, width, steps, column_tiles;
};

struct Memory {  // addresses in shared memory
  u32 a, b, pieces, full, empty;

  __device__ explicit Memory(u32 base) {
    a = (base + 1023) & ~1023u;
    b = a + STAGES * FACTOR_BYTES;
    pieces = b + STAGES * FACTOR_BYTES;
    full = pieces + 4 * PIECE;
    empty = full + 8 * STAGES;
  }
};

// Called by one thread.
__device__ void bring_factors(const Arguments& p, const Memory& memory, int row, int column) {
  for (int k = 0; k < p.steps; ++k) {
    const int stage = k % STAGES, round = k / STAGES;
    const u32 full = memory.full + 8 * stage;
    if (round > 0) wait(memory.empty + 8 * stage, (round - 1) & 1);
    expect(full, 2 * FACTOR_BYTES);
    load(memory.a + stage * FACTOR_BYTES, &p.a, k * DEPTH, row, full);
    load(memory.b + stage * FACTOR_BYTES, &p.b, k * DEPTH, column, full);
  }
}

__device__ void consume(const Arguments& p, const Memory& memory, int consumer, int first_row, int first_column) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 own = memory.a + consumer * FACTOR_BYTES / 2;  // rows of a in the first stage that only these warps read
  float total[64], acc[64];
#pragma unroll
  for (float& sum : total) sum = 0;
  for (int k = 0; k < p.steps; ++k) {
    const int stage = k % STAGES;
    const u64 a = descriptor(own + stage * FACTOR_BYTES, 16, 1024);
    const u64 b = descriptor(memory.b + stage * FACTOR_BYTES, 16, 1024);
    wait(memory.full + 8 * stage, k / STAGES & 1);
    keep_in_place(acc);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int kk = 0; kk < DEPTH / 32; ++kk)
      multiply<A_FORMAT, false>(acc, a + (kk * 32 >> 4), b + (kk * 32 >> 4), k % PROMOTE + kk > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) arrive(memory.empty + 8 * stage);
    keep_in_place(acc);
    if (k % PROMOTE == PROMOTE - 1 || k == p.steps - 1) {
#pragma unroll
      for (int i = 0; i < 64; ++i) total[i] += acc[i];
    }
  }
  // The transposed output's pieces overwrite rows of a, which all four warps have finished reading here.
  if (OUT_FORMAT != BF16) asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory");
  // The lane's row of the four 8 x 8 blocks that an instruction moves: the warp's 16 rows, two column blocks.
  const u32 at = (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 piece = memory.pieces + (consumer * 2 + half) * PIECE;
    u32 pairs[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float one = total[32 * half + 2 * i] * p.unscale, other = total[32 * half + 2 * i + 1] * p.unscale;
      if (RELU) {
        const int column = first_column + half * 64 + i / 2 * 8 + lane % 4 * 2;
        const u32 bias = column < p.width ? __ldg(reinterpret_cast<const u32*>(p.bias + column)) : 0;
        // Not fmaxf, which turns NaN into a number.
        one += low(bias), one = one < 0 ? 0 : one;
        other += high(bias), other = other < 0 ? 0 : other;
      }
      pairs[i] = pack(one, other);
    }
#pragma unroll
    for (int block = 0; block < 8; block += 2) write(piece + (at ^ block << 4), pairs + 2 * block);
    __syncwarp();
    const int row = first_row + consumer * 64, column = first_column + half * 64;
    store<OUT_FORMAT, OUT_FORMAT == BF16>(p, p.out, piece, row, column);
    if constexpr (OUT_FORMAT != BF16)
      store_transposed<OUT_FORMAT>(p, pairs, own + half * TRANSPOSED_PIECE, consumer, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) fp8_product(const __grid_constant__ Arguments p) {
  extern __shared__ unsigned char shared[];
  const Memory memory(static_cast<u32>(__cvta_generic_to_shared(shared)));
  const int row = blockIdx.x / p.column_tiles * TILE, column = blockIdx.x % p.column_tiles * TILE;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) init_barrier(memory.full + 8 * i, 1), init_barrier(memory.empty + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(p, memory, warpgroup, row, column);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) bring_factors(p, memory, row, column);
  }
}
