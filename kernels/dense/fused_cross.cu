// The cross network's products with their element-wise parts as epilogues, for Hopper (sm_90a); see fused_cross.py.
//
// acc = a @ b, a: [batch, depth], bf16; by MODE, with 2 * PAIRS inputs and 1 or 2 outputs, all bf16 [batch, width]:
//   FORWARD    in: x0, x          y = acc + bias;  x' = x0 * y + x                           b: [width, depth]
//   BACKWARD   in: g, x0          g' = g + acc;  dy = g' * x0, and its column sums           b: [depth, width]
//   OUTPUT_BACKWARD  in: x0       g' = acc, and all else as BACKWARD
//   INPUT      in: g_l, y_l ...   dx0 = acc + g_0 + sum over l of g_l * y_l                  b: [depth, width]
//
// Each block walks a range of 64 x 128 tiles, row tiles first, so that its 128 columns of b stay in
// shared memory for nearly the whole range. Two warpgroups alternate: one multiplies while the other runs its epilogue.
// Two more warps prefetch tiles with the bulk tensor copy engine, one those of a and b, the other the epilogue's
// inputs. Outputs overwrite their inputs in shared memory, from where each warp stores its rows in pieces of 128 bytes:
// the copy engine could store them too, but then the next inputs would have to wait.
//
// a and b may be 8-bit, b then always [width, depth]: acc is their product times unscale. The second output may be
// stored as scaled 8-bit values, plain and transposed, and then need not be stored in bf16. y may be in e4m3, in an
// order that only these kernels read: each tile's halves of 64 columns one after the other, in each half twice 16 bytes
// of every thread of the warpgroup, in the order of its accumulator.
//
// Macros: MODE, PAIRS, STEPS = ceil(depth / DEPTH), at most 8, SLOTS, the formats FACTORS of a and OUTPUT of the second
// output's copies (BF16: no copies), KEEPS: whether the second output is stored in bf16, and TILES: whether y is in
// e4m3.

#include "hopper.cuh"

constexpr int FORWARD = 0, BACKWARD = 1, INPUT = 2, OUTPUT_BACKWARD = 3;
constexpr int ROWS = 64, COLUMNS = 128, CHUNK = 64;  // size of a tile; a copy is at most 64 columns wide
constexpr int A_BYTES = ROWS * CHUNK * 2, B_BYTES = COLUMNS * CHUNK * 2, PIECE = ROWS * CHUNK * 2;
// STAGES buffers for a, and SLOTS for pairs of epilogue inputs. Together with b they fill shared memory. On an H200, at
// 3456 rows, FORWARD and INPUT of three layers: 36 and 48 us; 40 and 46 with 4 and 4, 38 and 54 with 8 and 2. With
// 8-bit factors, 4, 6 and 8 slots are equal within 1 us.
constexpr int MOST_STAGES = FACTORS ? 4 : 6, STAGES = STEPS < MOST_STAGES ? STEPS : MOST_STAGES;
constexpr Format A_FORMAT = Format(FACTORS), OUT_FORMAT = Format(OUTPUT);
constexpr int DEPTH = FACTORS ? 128 : 64;  // columns of one copy
constexpr int STEPS_OF_EPILOGUE = 2 * PAIRS;  // each handles 64 columns of a pair of inputs
constexpr int OUTPUTS = MODE == INPUT ? 1 : 2;
constexpr int FIRST_INPUT = MODE == OUTPUT_BACKWARD;  // within a pair: this mode has only the second input
constexpr int TILE_BYTES = ROWS * CHUNK;  // half of y's tile
constexpr bool READS_TILES = MODE == INPUT && TILES, WRITES_TILES = MODE == FORWARD && TILES;
constexpr int INPUT_BYTES = READS_TILES ? PIECE + TILE_BYTES : (2 - FIRST_INPUT) * PIECE;
constexpr bool HAS_SUMS = MODE == BACKWARD || MODE == OUTPUT_BACKWARD;
constexpr bool B_ROWS_ARE_DEPTH = MODE != FORWARD && !FACTORS;

struct Arguments {
  TensorMap a, b, inputs[2 * PAIRS];
  u16* outputs[2];
  const u16* bias;  // of FORWARD
  float* partials;
  u8 *quantised, *transposed;  // the second output
  u8* tiles[PAIRS];  // y times tiles_scale; in INPUT, tiles_scale is the inverse
  u64 *tally, *tiles_tally;  // for the second output, for y
  float scale, unscale, tiles_scale;
  u32 limit;  // for the second output's numbers
  int transposed_stride, batch, width, row_tiles, column_tiles, blocks_of_columns;
};

struct Memory {  // addresses in shared memory: of tiles, then of barriers
  u32 a, b, pieces, transposed, full, empty, turn, epilogue_turn, inputs_full, inputs_empty;

  __device__ explicit Memory(u32 base) {
    a = (base + 1023) & ~1023u;
    b = a + STAGES * A_BYTES;
    pieces = b + STEPS * B_BYTES;
    transposed = pieces + SLOTS * 2 * PIECE;
    full = transposed + (OUT_FORMAT == BF16 ? 0 : 4 * TRANSPOSED_PIECE);
    empty = full + 8 * STAGES;
    turn = empty + 8 * STAGES;
    epilogue_turn = turn + 8 * 2;
    inputs_full = epilogue_turn + 8 * 2;
    inputs_empty = inputs_full + 8 * SLOTS;
  }
  __device__ u32 piece(int slot, int of_pair) const { return pieces + (slot * 2 + of_pair) * PIECE; }
};

// A block's tiles: `begin` to `end` in the order of one column range after another, row by row. A block starts in its
// first column range at the same phase as the others, so that at any time all blocks are at nearly the same rows, up to
// a multiple of one block's share: whole rows are read and written together, which takes 4 % less time.
struct Tiles {
  int row_tiles, begin, end, first_columns, first_row, in_first, shift;

  __device__ explicit Tiles(const Arguments& p) {
    const u64 all = u64(p.row_tiles) * p.column_tiles, blocks = gridDim.x;
    row_tiles = p.row_tiles;
    begin = blockIdx.x * all / blocks, end = (blockIdx.x + 1) * all / blocks;
    first_columns = begin / row_tiles, first_row = begin % row_tiles;
    in_first = min(end - begin, row_tiles - first_row);
    const u64 rounds = (first_row * blocks + all - 1) / all;  // of all blocks, so far as these columns go
    shift = int((rounds * all + blocks - 1) / blocks) - first_row;
    if (shift >= in_first) shift = 0;
  }
  __device__ int count() const { return end - begin; }
  __device__ int columns(int i) const { return (begin + i) / row_tiles; }
  __device__ int rows(int i) const {
    if (i >= in_first) return (begin + i) % row_tiles;
    const int shifted = i + shift;
    return first_row + (shifted < in_first ? shifted : shifted - in_first);
  }
};

// Called by one thread: loads the tiles of a, and with the first tile of new columns those of b. A free stage means
// that all products of STAGES steps ago have finished. As STAGES is at most STEPS, these include the previous tile's
// products that read the chunk of b that is overwritten here.
__device__ void bring_factors(const Arguments& p, const Memory& memory, const Tiles& tiles) {
  int step = 0, columns = -1;
  for (int tile = 0; tile < tiles.count(); ++tile) {
    const int n = tiles.columns(tile), m = tiles.rows(tile);
    for (int k = 0; k < STEPS; ++k, ++step) {
      const int stage = step % STAGES, round = step / STAGES;
      const u32 full = memory.full + 8 * stage;
      if (round > 0) wait(memory.empty + 8 * stage, (round - 1) & 1);
      expect(full, n != columns ? A_BYTES + B_BYTES : A_BYTES);
      load(memory.a + stage * A_BYTES, &p.a, k * DEPTH, m * ROWS, full);
      if (n != columns) {
        const u32 b = memory.b + k * B_BYTES;
        if (B_ROWS_ARE_DEPTH) {
          load(b, &p.b, n * COLUMNS, k * CHUNK, full);
          load(b + B_BYTES / 2, &p.b, n * COLUMNS + CHUNK, k * CHUNK, full);
        } else {
          load(b, &p.b, k * DEPTH, n * COLUMNS, full);
        }
      }
    }
    columns = n;
  }
}

__device__ __forceinline__ u8* y_tile(const Arguments& p, int layer, int row_tile, int column_tile, int half) {
  return p.tiles[layer] + ((u64(row_tile) * p.column_tiles + column_tile) * 2 + half) * TILE_BYTES;
}

// Called by one thread: loads the epilogue's inputs.
__device__ void bring_inputs(const Arguments& p, const Memory& memory, const Tiles& tiles) {
  int step = 0;
  for (int tile = 0; tile < tiles.count(); ++tile) {
    const int column = tiles.columns(tile) * COLUMNS, row = tiles.rows(tile) * ROWS;
    for (int i = 0; i < STEPS_OF_EPILOGUE; ++i, ++step) {
      const int slot = step % SLOTS, round = step / SLOTS;
      const u32 full = memory.inputs_full + 8 * slot;
      if (round > 0) wait(memory.inputs_empty + 8 * slot, (round - 1) & 1);
      expect(full, INPUT_BYTES);
      if (READS_TILES)
        copy(memory.piece(slot, 1), y_tile(p, i % PAIRS, tiles.rows(tile), tiles.columns(tile), i / PAIRS), TILE_BYTES,
             full);
      for (int j = FIRST_INPUT; j < 2 - READS_TILES; ++j)
        load(memory.piece(slot, j), &p.inputs[i % PAIRS * 2 + j], column + i / PAIRS * CHUNK, row, full);
    }
  }
}

// Keeps half of the sums of 2 * COUNT blocks of 8 columns, after adding those of the lanes at `distance`.
template <int COUNT>
__device__ __forceinline__ void halve(float (&sums)[16], int lane, int distance) {
  const bool upper = lane & distance;
#pragma unroll
  for (int i = 0; i < 2 * COUNT; ++i) {
    const float mine = upper ? sums[i + 2 * COUNT] : sums[i], others = upper ? sums[i] : sums[i + 2 * COUNT];
    sums[i] = mine + __shfl_xor_sync(0xffffffffu, others, distance);
  }
}

// Adds sums over the warp's 16 rows to `first` and `second`: the lane's two columns of block lane / 4 of 8 columns.
__device__ __forceinline__ void add_rows(float (&sums)[16], int lane, float& first, float& second) {
  halve<4>(sums, lane, 16);
  halve<2>(sums, lane, 8);
  halve<1>(sums, lane, 4);
  first += sums[0];
  second += sums[1];
}

// Stores column sums of the tiles of one column range, each warp's in a separate row; the last block at these columns
// zeroes the rows that only other column ranges, with more blocks, need.
__device__ void store_sums(const Arguments& p, float (&sums)[4], int n, int consumer, int warp, int lane) {
  const int tiles = p.row_tiles * p.column_tiles, blocks = gridDim.x;
  // Of tile t: the last block that begins, at block * tiles / blocks, not after it.
  const int first = ((u64(n) * p.row_tiles + 1) * blocks - 1) / tiles;
  const int last = (u64(n + 1) * p.row_tiles * blocks - 1) / tiles;
  for (int block = blockIdx.x - first; block < p.blocks_of_columns; ++block) {
    float* row = p.partials + u64(block * 8 + consumer * 4 + warp) * p.width;
    for (int j = 0; j < 2; ++j) {
      const int column = n * COLUMNS + j * CHUNK + lane / 4 * 8 + lane % 4 * 2;
      if (column < p.width) row[column] = sums[2 * j], row[column + 1] = sums[2 * j + 1];
    }
    for (float& sum : sums) sum = 0;
    if (int(blockIdx.x) < last) break;
  }
  for (float& sum : sums) sum = 0;
}

__host__ __device__ constexpr int greatest_common_divisor(int a, int b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

// acc = the block's tile i. FIRST: the stage of its first step, a compile-time constant in the instructions.
template <int FIRST>
__device__ __forceinline__ void multiply_tile(float (&acc)[64], const Memory& memory, int i, int consumer, int lane) {
  constexpr int APART = greatest_common_divisor(STEPS, STAGES);
  if constexpr (FIRST + APART < STAGES) {
    if (i * STEPS % STAGES != FIRST) return multiply_tile<FIRST + APART>(acc, memory, i, consumer, lane);
  }
  const u64 a = descriptor(memory.a, 16, 1024), b = descriptor(memory.b, B_ROWS_ARE_DEPTH ? B_BYTES / 2 : 16, 1024);
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    const int stage = (FIRST + k) % STAGES;
    wait(memory.full + 8 * stage, (i * STEPS + k) / STAGES & 1);
    if (k == STEPS - 1 && lane == 0) arrive(memory.turn + 8 * (1 - consumer));
    // As in fp8.cu: tells the compiler about reads and writes by multiplications in flight, which it cannot see.
    if (k == 0) keep_in_place(acc);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int kk = 0; kk < CHUNK / 16; ++kk) {
      const u64 of_a = a + (stage * A_BYTES + kk * 32 >> 4);
      const u64 of_b = b + (k * B_BYTES + kk * (B_ROWS_ARE_DEPTH ? 2048 : 32) >> 4);
      multiply<A_FORMAT, B_ROWS_ARE_DEPTH>(acc, of_a, of_b, k + kk > 0);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (k > 0) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (lane == 0) arrive(memory.empty + 8 * ((FIRST + k - 1) % STAGES));
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep_in_place(acc);
  if (lane == 0) arrive(memory.empty + 8 * ((FIRST + STEPS - 1) % STAGES));
}

// Tallies elements of y that e4m3 cannot represent; a lane has column pairs: [block of 8 columns][row, row 8 below].
__device__ __forceinline__ void count_y(const Arguments& p, const float (&y)[32], int row, int column) {
  if (p.tiles_tally == nullptr) return;
  float largest = 0;
#pragma unroll
  for (float value : y) asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(largest), "f"(fabsf(value)));
  const float limit = 448 / p.tiles_scale;
  if (largest <= limit) return;
  u32 large = 0, not_finite = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (row + i / 2 % 2 * 8 >= p.batch || column + i / 4 * 8 >= p.width) continue;
    const float magnitude = fabsf(y[i]);
    if (!(magnitude < __uint_as_float(0x7f800000)))
      ++not_finite;
    else if (magnitude > limit)
      ++large;
  }
  if (large) atomicAdd(p.tiles_tally, u64(large));
  if (not_finite) atomicAdd(p.tiles_tally + 1, u64(not_finite));
}

__device__ void consume(const Arguments& p, const Memory& memory, const Tiles& tiles, int consumer) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  // The lane's row of the four 8 x 8 blocks that an instruction moves: the warp's 16 rows, two column blocks.
  const u32 at = (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
  const float unscale = FACTORS ? p.unscale : 1;
  float acc[64];
  float sums[4] = {0, 0, 0, 0};
  int columns = tiles.columns(0);  // the column range that `sums` covers
  for (int i = consumer, round = 0; i < tiles.count(); i += 2, ++round) {
    const int n = tiles.columns(i), first_row = tiles.rows(i) * ROWS;
    if (HAS_SUMS)
      for (; columns < n; ++columns) store_sums(p, sums, columns, consumer, warp, lane);
    if (i > 0) wait(memory.turn + 8 * consumer, (round - (consumer == 0)) & 1);
    multiply_tile<0>(acc, memory, i, consumer, lane);
    if (i > 0) wait(memory.epilogue_turn + 8 * consumer, (round - (consumer == 0)) & 1);

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&d)[32] = *reinterpret_cast<float(*)[32]>(acc + 32 * half);
      u32 bias[8];
#pragma unroll
      for (int block = 0; block < 8 && MODE == FORWARD; ++block) {
        const int column = n * COLUMNS + half * CHUNK + block * 8 + lane % 4 * 2;
        bias[block] = column < p.width ? __ldg(reinterpret_cast<const u32*>(p.bias + column)) : 0;
      }
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int step = i * STEPS_OF_EPILOGUE + half * PAIRS + pair, slot = step % SLOTS;
        const u32 first = memory.piece(slot, 0), second = first + PIECE;
        wait(memory.inputs_full + 8 * slot, step / SLOTS & 1);
        const bool last = half * PAIRS + pair == STEPS_OF_EPILOGUE - 1;
        if (last && lane == 0) arrive(memory.epilogue_turn + 8 * (1 - consumer));
        u32 one[16], other[16];  // column pairs: [block][row, row 8 below]
        u32 eight[8];            // y, two of these pairs in each
        if (READS_TILES) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint4 words = words_at(second + i * TILE_BYTES / 2 + threadIdx.x % 128 * 16);
#pragma unroll
            for (int j = 0; j < 4; ++j) eight[4 * i + j] = word(words, j);
          }
        }
#pragma unroll
        for (int block = 0; block < 8; block += 2) {
          if (FIRST_INPUT == 0) read(first + (at ^ block << 4), one + 2 * block);
          if (!READS_TILES) read(second + (at ^ block << 4), other + 2 * block);
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float &d0 = d[2 * i], &d1 = d[2 * i + 1];
          const float one0 = FIRST_INPUT ? 0 : low(one[i]), one1 = FIRST_INPUT ? 0 : high(one[i]);
          float other0, other1;
          if (READS_TILES)
            from_e4m3(eight[i / 2] >> i % 2 * 16, other0, other1), other0 *= p.tiles_scale, other1 *= p.tiles_scale;
          else
            other0 = low(other[i]), other1 = high(other[i]);
          if (MODE == FORWARD) {
            d0 = d0 * unscale + low(bias[i / 2]), d1 = d1 * unscale + high(bias[i / 2]);
            if (WRITES_TILES)
              one[i] = quantise<E4M3>(d0, d1, p.tiles_scale);
            else
              one[i] = pack(d0, d1);
            other[i] = pack(one0 * d0 + other0, one1 * d1 + other1);
          } else if (HAS_SUMS) {
            d0 = d0 * unscale + one0, d1 = d1 * unscale + one1;
            one[i] = pack(d0, d1);
            d0 *= other0, d1 *= other1;
            other[i] = pack(d0, d1);
          } else {
            if (pair == 0) d0 *= unscale, d1 *= unscale;
            d0 += pair == 0 ? one0 * other0 + one0 : one0 * other0;
            d1 += pair == 0 ? one1 * other1 + one1 : one1 * other1;
            if (pair == PAIRS - 1) one[i] = pack(d0, d1);
          }
        }
        if constexpr (WRITES_TILES) {
          count_y(p, d, first_row + warp * 16 + lane / 4, n * COLUMNS + half * CHUNK + lane % 4 * 2);
          __syncwarp();  // lanes that counted come later, and stmatrix needs the whole warp at once
        }
        if (pair == PAIRS - 1) {
#pragma unroll
          for (int block = 0; block < 8; block += 2) {
            if (!WRITES_TILES) write(first + (at ^ block << 4), one + 2 * block);
            if (MODE != INPUT) write(second + (at ^ block << 4), other + 2 * block);
          }
          __syncwarp();
          const int column = n * COLUMNS + half * CHUNK;
          if (WRITES_TILES) {
            uint4* to = reinterpret_cast<uint4*>(y_tile(p, 0, tiles.rows(i), n, half)) + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < 2; ++j)
              to[j * 128] = make_uint4(one[8 * j] | one[8 * j + 1] << 16, one[8 * j + 2] | one[8 * j + 3] << 16,
                                       one[8 * j + 4] | one[8 * j + 5] << 16, one[8 * j + 6] | one[8 * j + 7] << 16);
          } else {
            store<BF16, true>(p, p.outputs[0], first, first_row, column);
          }
          if (OUTPUTS == 2) store<OUT_FORMAT, KEEPS>(p, p.outputs[1], second, first_row, column);
          if constexpr (OUT_FORMAT != BF16) {
            const u32 piece = memory.transposed + (consumer * 2 + half) * TRANSPOSED_PIECE;
            store_transposed<OUT_FORMAT>(p, other, piece, consumer, first_row, column);
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(memory.inputs_empty + 8 * slot);
      }
      if (HAS_SUMS) {
        float of_rows[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) of_rows[i] = d[i / 2 * 4 + i % 2] + d[i / 2 * 4 + i % 2 + 2];
        add_rows(of_rows, lane, sums[2 * half], sums[2 * half + 1]);
      }
    }
  }
  if (HAS_SUMS)
    for (; columns <= tiles.columns(tiles.count() - 1); ++columns) store_sums(p, sums, columns, consumer, warp, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) fused_cross(const __grid_constant__ Arguments p) {
  extern __shared__ unsigned char shared[];
  const Memory memory(static_cast<u32>(__cvta_generic_to_shared(shared)));
  const Tiles tiles(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) init_barrier(memory.full + 8 * i, 1), init_barrier(memory.empty + 8 * i, 4);
    for (int i = 0; i < 2; ++i) init_barrier(memory.turn + 8 * i, 4), init_barrier(memory.epilogue_turn + 8 * i, 4);
    for (int i = 0; i < SLOTS; ++i)
      init_barrier(memory.inputs_full + 8 * i, 1), init_barrier(memory.inputs_empty + 8 * i, 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup < 2) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(p, memory, tiles, warpgroup);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) bring_factors(p, memory, tiles);
    if (threadIdx.x == 288) bring_inputs(p, memory, tiles);
  }
}
