// 8-bit matrices, plain and transposed, for Hopper (sm_90a); see fp8_copies.py.
//
// Input: bf16 matrices [batch, width]: x, or with MASK x zeroed where mask <= 0, and its column sums.
//
// A warp has a tile of 64 rows and 64 columns, a lane 16 rows and 8 columns of it: 16 bytes of each column, in the
// order of hopper.cuh's transposed pieces. Lanes exchange nothing except for the sums.
//
// Macros: MASK, and OUTPUT, the format.

#include "hopper.cuh"

constexpr int TILE = 64, WARPS = 4;
constexpr Format OUT_FORMAT = Format(OUTPUT);

struct Arguments {
  const u16 *x, *mask;
  u8 *quantised, *transposed;
  float* partials;  // [batch / TILE, width]
  u64* tally;
  float scale;
  u32 limit;
  int transposed_stride, batch, width, column_tiles;
};

__device__ __forceinline__ u32 masked(u32 pair, u32 out) {  // the backward of a ReLU with output `out`
  return (low(out) <= 0 ? 0 : pair & 0xffffu) | (high(out) <= 0 ? 0 : pair & 0xffff0000u);
}

// Counts over 16 rows and 8 columns.
__device__ void count_beyond(const Arguments& p, int row, int column) {
  Beyond counts;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const u64 at = u64(row + i) * p.width + column;
    const u32* x = reinterpret_cast<const u32*>(p.x + at);
    const u32* mask = reinterpret_cast<const u32*>(p.mask + at);
#pragma unroll 1
    for (int j = 0; j < 4; ++j) counts.add_pair(MASK ? masked(x[j], mask[j]) : x[j], p.limit);
  }
  counts.add_to(p.tally);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) fp8_copies(const __grid_constant__ Arguments p) {
  const int lane = threadIdx.x % 32, tile = blockIdx.x * WARPS + threadIdx.x / 32;
  const int row_tile = tile / p.column_tiles, row = row_tile * TILE + lane / 8 * 16;
  const int column = tile % p.column_tiles * TILE + lane % 8 * 8;
  const bool inside = row < p.batch && column < p.width;
  float sums[8];
  u32 columns[8][4], largest = 0;  // the bytes of 16 rows of each column
#pragma unroll
  for (float& sum : sums) sum = 0;
#pragma unroll
  for (int half = 0; half < 2 && inside; ++half) {
    uint4 x[8], mask[8];  // rows 0, 8, 1, 9 and so on, of the half from row 4 * half on
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u64 at = u64(row + half * 4 + i / 2 + i % 2 * 8) * p.width + column;
      x[i] = __ldg(reinterpret_cast<const uint4*>(p.x + at));
      if (MASK) mask[i] = __ldg(reinterpret_cast<const uint4*>(p.mask + at));
    }
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      u32 pairs[4][4];  // by row, of columns
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          u32 pair = word(x[4 * quad + i], j);
          if (MASK) pair = masked(pair, word(mask[4 * quad + i], j));
          largest = larger(largest, pair);
          sums[2 * j] += low(pair), sums[2 * j + 1] += high(pair);
          pairs[i][j] = quantise<OUT_FORMAT>(pair, p.scale);
        }
        const int at_row = row + half * 4 + quad * 2 + i / 2 + i % 2 * 8;
        store_row(p.quantised + u64(at_row) * p.width + column, pairs[i]);
      }
      transpose(pairs, columns, half * 2 + quad);
    }
  }
  if (inside) store_columns(p.transposed, p.transposed_stride, row, column, columns);
  if (beyond(largest, p.limit)) count_beyond(p, row, column);
  if constexpr (MASK) {
#pragma unroll
    for (float& sum : sums) {
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    }
    if (lane < 8 && inside) {
      float4* to = reinterpret_cast<float4*>(p.partials + u64(row_tile) * p.width + column);
      to[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      to[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
  }
}
