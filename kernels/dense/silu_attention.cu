// Causal SiLU attention over jagged sequences, for Hopper (sm_90a); see silu_attention.py.
//
// Three kernels by MODE, each over tiles: a tile of X, 128 rows of a sequence and a head, stays while tiles of Y,
// Y_ROWS rows of that sequence and head each, stream past:
//   FORWARD  X: q      Y: k, v     s = q k'                     out = w v
//   KEY      X: k, v   Y: q, do    s' = k q'    dw' = v do'     dk = ds' q    dv = w' do    and stores ds'
//   QUERY              Y: k, ds'                                dq = ds k
// with w = silu(alpha s) for attended keys and ds = dw * silu'(alpha s); outputs are multiplied by a scale. No sum
// crosses tiles of X, so each is added in one order. dq is computed from ds in memory, in bf16: recomputing s and dw
// would add two products to seven, and summing dq in memory would make blocks take turns.
//
// One block per multiprocessor takes items (a tile of X) from a list that keeps each sequence and head together,
// because their items share Y in L2. One warp loads tiles with the bulk tensor copy engine, and loads X of the next
// item during the current one. Two warpgroups have 64 rows of X each; one's element-wise work overlaps the other's
// products.
//
// Rows past a sequence's end in its last tile belong to other sequences: those of Y, and of X if ds is stored, are
// zeroed in shared memory; the other rows of X are computed but not stored.

#include "silu_attention_consumer.cuh"

// Loads both warpgroups' pieces of 64 keys, if they exist.
__device__ __forceinline__ void load_pieces(const Arguments& p, const Item& item, int x_tile, int keys, u32 to,
                                            u32 full) {
  const int first = max(2 * x_tile, keys), last = min(2 * x_tile + 1, (item.length - 1) / 64);
  expect(full, (last - first + 1) * PIECE * 2);
  for (int rows = first; rows <= last; ++rows)
    copy(to + rows % 2 * PIECE * 2, p.pieces + u64(piece_of(item, rows, keys)) * PIECE, PIECE * 2, full);
}

// Called by one thread.
__device__ void bring_tiles(const Arguments& p, const Memory& memory) {
  const int begin = p.range[0], end = p.range[1];
  Slot slot{0, 0};
  for (int index = begin + blockIdx.x, i = 0;; ++i) {
    const int x_slot = i % 2;
    const u32 x_full = memory.x_full + 8 * x_slot;
    Item item{0, 0, 0, -1};
    if (index < end) item = p.items[index];
    if (i >= 2) wait(memory.x_empty + 8 * x_slot, (i / 2 - 1) & 1);
    put_item(memory.items + 32 * x_slot, item);
    if (index >= end) return arrive(x_full);
    const Tiles tiles(item);
    if (MODE == QUERY) {
      arrive(x_full);
    } else {
      expect(x_full, X_OPERANDS * X_BYTES);
      for (int j = 0; j < X_OPERANDS; ++j)
        load_tile(memory.x + (x_slot * X_OPERANDS + j) * X_BYTES, X_HALF, &p.x[j], tiles.head * WIDTH,
                  item.start + tiles.x_tile * X_ROWS, x_full);
    }
    index = begin + gridDim.x + atomicAdd(p.taken, 1);
    for (int tile = tiles.top; tile >= tiles.bottom; --tile) {
      for (int j = 0; j < 2; ++j, slot.advance(1)) {
        const u32 full = memory.full + 8 * slot.index, to = memory.y + slot.index * Y_BYTES;
        wait(memory.empty + 8 * slot.index, slot.parity ^ 1);
        if (MODE == QUERY && j == 1) {
          load_pieces(p, item, tiles.x_tile, tile, to, full);
        } else {
          expect(full, Y_BYTES);
          load_tile(to, Y_HALF, &p.y[j], tiles.head * WIDTH, item.start + tile * Y_ROWS, full);
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) silu_attention(const __grid_constant__ Arguments p) {
  extern __shared__ unsigned char shared[];
  const Memory memory(static_cast<u32>(__cvta_generic_to_shared(shared)));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) init_barrier(memory.x_full + 8 * i, 1), init_barrier(memory.x_empty + 8 * i, 8);
    for (int i = 0; i < SLOTS; ++i) init_barrier(memory.full + 8 * i, 1), init_barrier(memory.empty + 8 * i, 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MODE == KEY ? 24 : 40));
    if (threadIdx.x == 0) bring_tiles(p, memory);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MODE == KEY ? 240 : 232));
    Consumer(p, memory, warpgroup - 1).consume();
  }
}
