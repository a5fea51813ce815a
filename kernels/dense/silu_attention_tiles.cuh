// Shared by silu_attention.cu's warps: sizes by MODE, arguments, shared memory, and the tiles that an item takes.

#include "silu_attention.cuh"

enum { FORWARD, KEY, QUERY };
constexpr int X_ROWS = 128, WIDTH = 128, WARPGROUP_ROWS = 64;
constexpr int X_OPERANDS = MODE == KEY ? 2 : 1;  // in QUERY: room for its output
constexpr int Y_ROWS = MODE == FORWARD ? 128 : 64;
constexpr int SLOTS = MODE == FORWARD ? 5 : MODE == KEY ? 6 : 10;  // tiles of Y, one operand each
constexpr int X_HALF = X_ROWS * 128, Y_HALF = Y_ROWS * 128;  // bytes of 64 columns
constexpr int X_BYTES = 2 * X_HALF, Y_BYTES = 2 * Y_HALF;
constexpr float MASKED = -1e4f;  // score at which silu and its derivative are exactly 0

// ds' of 64 keys and 64 rows: memory rows are keys, with the 128-byte swizzle; within them, rows are in the order of a
// lane's accumulator pairs.
constexpr int PIECE = 64 * 64;

struct Item {
  int start, length, history, tile_and_head, first_piece, unused[3];
};

struct Arguments {
  TensorMap x[2], y[2];
  u16* out[2];  // out; dq; dk, dv
  u64 stride[2];
  const Item* items;
  const int* range;  // of items
  int* taken;  // number of items taken, excluding each block's first
  u16* pieces;
  float half_alpha;
  float scale[2];  // of outputs
};

struct Memory {  // addresses in shared memory: of tiles, then of barriers and items
  u32 x, y, x_full, x_empty, full, empty, items;

  __device__ explicit Memory(u32 base) {
    x = (base + 1023) & ~1023u;
    y = x + 2 * X_OPERANDS * X_BYTES;
    x_full = y + SLOTS * Y_BYTES;
    x_empty = x_full + 16;
    full = x_empty + 16;
    empty = full + 8 * SLOTS;
    items = (empty + 8 * SLOTS + 15) & ~15u;  // two, of 32 bytes
  }
};

struct Slot {  // in the ring of Y's tiles
  int index, parity;

  __device__ void advance(int by) {
    index += by;
    if (index >= SLOTS) index -= SLOTS, parity ^= 1;
  }
};

__device__ __forceinline__ Item item_at(u32 address) {
  const uint4 words = words_at(address), more = words_at(address + 16);
  return {int(words.x), int(words.y), int(words.z), int(words.w), int(more.x)};
}

__device__ __forceinline__ void put_item(u32 address, const Item& item) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(item.start), "r"(item.length),
               "r"(item.history), "r"(item.tile_and_head)
               : "memory");
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address + 16), "r"(item.first_piece) : "memory");
}

// Within a sequence and head, earlier row blocks come first; each has one piece per key block up to its own.
__device__ __forceinline__ int piece_of(const Item& item, int rows, int keys) {
  return item.first_piece + rows * (rows + 1) / 2 + keys;
}

struct Tiles {  // the tiles of Y that an item takes, from the top one down
  int x_tile, head, top, bottom;

  __device__ explicit Tiles(const Item& item) {
    x_tile = item.tile_and_head & 0xffff, head = item.tile_and_head >> 16;
    if (MODE != KEY) x_tile = (item.length - 1) / X_ROWS - x_tile;  // items with more work first
    const int end = MODE == KEY ? item.length : min(item.length, (x_tile + 1) * X_ROWS);
    top = (end - 1) / Y_ROWS;
    bottom = MODE == KEY ? x_tile * (X_ROWS / Y_ROWS) : 0;
  }
};

__device__ __forceinline__ void load_tile(u32 to, int half_bytes, const TensorMap* from, int column, int row, u32 full) {
  load(to, from, column, row, full);
  load(to + half_bytes, from, column + 64, row, full);
}
