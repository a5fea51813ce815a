// Weights in eight bits, as they are and transposed, for Hopper (sm_90a); see fp8_weights.py.
//
// One block has a tile of 128 rows and 64 columns of one weight: each thread rounds eight numbers of a row at a time,
// then writes 32 of a column, whose 32 bytes are what memory takes at once.

#include "hopper.cuh"

constexpr int ROWS = 128, COLUMNS = 64, RUN = 32;
constexpr int STRIDE = COLUMNS + 8;  // of the tile's rows in shared memory: a warp's columns are in banks of their own

struct Tile {
  const u16* weight;
  u8 *plain, *transposed;
  int rows, columns, row, column;  // of the weight; the tile's first ones
};

struct Arguments {
  const Tile* tiles;
  float scale;
};

__device__ __forceinline__ u32 byte_at(const u8* column, int row) { return column[row * STRIDE]; }

extern "C" __global__ void __launch_bounds__(256) fp8_weights(const __grid_constant__ Arguments p) {
  __shared__ alignas(16) u8 bytes[ROWS * STRIDE];
  const Tile t = p.tiles[blockIdx.x];
#pragma unroll
  for (int i = 0; i < ROWS * COLUMNS / 8 / 256; ++i) {
    const int chunk = i * 256 + threadIdx.x, row = chunk / 8, column = chunk % 8 * 8;
    if (t.row + row >= t.rows || t.column + column >= t.columns) continue;
    const u64 at = u64(t.row + row) * t.columns + t.column + column;
    const uint4 pairs = *reinterpret_cast<const uint4*>(t.weight + at);
    uint2 eight;
    eight.x = quantise<E4M3>(pairs.x, p.scale) | quantise<E4M3>(pairs.y, p.scale) << 16;
    eight.y = quantise<E4M3>(pairs.z, p.scale) | quantise<E4M3>(pairs.w, p.scale) << 16;
    *reinterpret_cast<uint2*>(t.plain + at) = eight;
    *reinterpret_cast<uint2*>(bytes + row * STRIDE + column) = eight;
  }
  __syncthreads();
  const int column = threadIdx.x % COLUMNS, first_row = threadIdx.x / COLUMNS * RUN;
  if (t.column + column >= t.columns) return;
  u8* to = t.transposed + u64(t.column + column) * t.rows + t.row + first_row;
#pragma unroll
  for (int i = 0; i < RUN; i += 16) {
    if (t.row + first_row + i >= t.rows) return;
    u32 words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const u8* from = bytes + (first_row + i + 4 * word) * STRIDE + column;
      words[word] = byte_at(from, 0) | byte_at(from, 1) << 8 | byte_at(from, 2) << 16 | byte_at(from, 3) << 24;
    }
    *reinterpret_cast<uint4*>(to + i) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}
