// Work list for silu_attention.cu's blocks: tiles of 128 rows of every sequence and head.
//
// Tiles of a sequence and head are adjacent; sequences with more tiles come first, so that short items come last. A
// sequence and head have pieces of the weights' gradients, of 64 rows and keys. Pieces are counted in list order and
// divided into ranges of equal length; a pass's items are those whose pieces begin in its range, from first[pass] to
// first[pass + 1] - 1. One block per sequence; it counts the tiles and pieces of the sequences before it.

using u64 = unsigned long long;

constexpr int ROWS = 128, PIECE = 64;

struct Item {
  int start, length, history, tile_and_head, first_piece, unused[3];
};

struct Arguments {
  const void *offsets, *targets;
  Item* items;
  int *first, *taken;  // passes + 1 numbers, and 2 * passes numbers, set to 0
  int sequences, heads, offsets_bytes, targets_bytes, max_length, passes, pieces;
};

__device__ int number(const void* numbers, int bytes, int i) {
  return bytes == 8 ? int(static_cast<const long long*>(numbers)[i]) : static_cast<const int*>(numbers)[i];
}

// Clamped to the maximum length, because memory for pieces would not suffice otherwise.
__device__ int length_of(const Arguments& p, int i) {
  return min(number(p.offsets, p.offsets_bytes, i + 1) - number(p.offsets, p.offsets_bytes, i), p.max_length);
}

__device__ int tiles_of(int length) { return (length + ROWS - 1) / ROWS; }

__device__ int pieces_of(int length) {
  const int rows = (length + PIECE - 1) / PIECE;
  return rows * (rows + 1) / 2;
}

extern "C" __global__ void __launch_bounds__(128) silu_attention_items(const __grid_constant__ Arguments p) {
  __shared__ int tiles_before, pieces_before, all_tiles, all_pieces;
  if (threadIdx.x == 0) tiles_before = pieces_before = all_tiles = all_pieces = 0;
  __syncthreads();
  const int own = blockIdx.x, start = number(p.offsets, p.offsets_bytes, own), length = length_of(p, own);
  const int tiles = tiles_of(length), pieces = pieces_of(length);
  for (int other = threadIdx.x; other < p.sequences; other += blockDim.x) {
    const int others = length_of(p, other);
    if (tiles_of(others) > tiles || (tiles_of(others) == tiles && other < own)) {
      atomicAdd(&tiles_before, p.heads * tiles_of(others));
      atomicAdd(&pieces_before, p.heads * pieces_of(others));
    }
    atomicAdd(&all_tiles, p.heads * tiles_of(others));
    atomicAdd(&all_pieces, p.heads * pieces_of(others));
  }
  __syncthreads();
  const int history = length - number(p.targets, p.targets_bytes, own);
  for (int i = threadIdx.x; i < tiles * p.heads; i += blockDim.x) {
    const int head = i / tiles;
    p.items[tiles_before + i] = {start, length, history, i % tiles | head << 16, pieces_before + head * pieces};
  }
  for (int head = threadIdx.x; head < p.heads && tiles > 0; head += blockDim.x) {
    const int end = pieces_before + (head + 1) * pieces, pass = (end - pieces) / p.pieces;
    const int last = end == all_pieces ? p.passes : end / p.pieces;
    for (int i = pass + 1; i <= last; ++i) p.first[i] = tiles_before + (head + 1) * tiles;
  }
  if (own > 0) return;
  for (int i = threadIdx.x; i <= p.passes; i += blockDim.x)
    if (i == 0 || all_tiles == 0) p.first[i] = 0;
  for (int i = threadIdx.x; i < 2 * p.passes; i += blockDim.x) p.taken[i] = 0;
}
