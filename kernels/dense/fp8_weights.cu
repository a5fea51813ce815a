// 8-bit copies of weights, plain and transposed, for Hopper (sm_90a); see fp8_weights.py.
//
// A warp has a tile of 64 rows and 64 columns of one weight, a lane 16 rows and 8 columns of it: 16 bytes of each
// column.

#include "hopper.cuh"

constexpr int WARPS = 4;

struct Tile {
  const u16* weight;
  u8 *plain, *transposed;
  u64* tally;
  int rows, columns, row, column;  // size of the weight; the tile's first row and column
};

struct Arguments {
  const Tile* tiles;
  float scale;
  u32 limit;
  int count;  // number of tiles
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) fp8_weights(const __grid_constant__ Arguments p) {
  const int lane = threadIdx.x % 32, index = blockIdx.x * WARPS + threadIdx.x / 32;
  if (index >= p.count) return;
  const Tile t = p.tiles[index];
  const int row = t.row + lane / 8 * 16, column = t.column + lane % 8 * 8;
  if (row >= t.rows || column >= t.columns) return;
  u32 columns[8][4], largest = 0;  // the bytes of 16 rows of each column
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 weights[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      weights[i] = __ldg(reinterpret_cast<const uint4*>(t.weight + u64(row + half * 8 + i) * t.columns + column));
      largest = largest_of(largest, weights[i]);
    }
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      u32 pairs[4][4];  // by row, of columns
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[i][j] = quantise<E4M3>(word(weights[4 * quad + i], j), p.scale);
        store_row(t.plain + u64(row + half * 8 + quad * 4 + i) * t.columns + column, pairs[i]);
      }
      transpose(pairs, columns, half * 2 + quad);
    }
  }
  store_columns(t.transposed, t.rows, row, column, columns);
  if (!beyond(largest, p.limit)) return;
  Beyond counts;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    const u32* pairs = reinterpret_cast<const u32*>(t.weight + u64(row + i) * t.columns + column);
#pragma unroll 1
    for (int j = 0; j < 4; ++j) counts.add_pair(pairs[j], p.limit);
  }
  counts.add_to(t.tally);
}
