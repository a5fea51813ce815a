// Work of silu_attention.cu's two consumer warpgroups: products and element-wise operations.

#include "silu_attention_tiles.cuh"

// A warp's view of the work: its warpgroup's 64 rows of X, and the 16 of these that are its own.
struct Consumer {
  const Arguments& p;
  const Memory& memory;
  int warpgroup, warp, lane;
  Slot y0, y1;  // of the next tiles

  __device__ Consumer(const Arguments& p, const Memory& memory, int warpgroup)
      : p(p), memory(memory), warpgroup(warpgroup), warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32) {
    y0 = {0, 0}, y1 = {1, 0};
  }

  __device__ __forceinline__ Slot second_of(const Slot& slot) const {  // SLOTS is even
    return {slot.index + 1, slot.parity};
  }
  __device__ __forceinline__ u32 tile(const Slot& slot) const { return memory.y + slot.index * Y_BYTES; }

  __device__ __forceinline__ void await(const Slot& slot) const { wait(memory.full + 8 * slot.index, slot.parity); }

  // Releases a tile once at most PENDING groups of products are in flight; d: the result of the tile's products.
  template <int PENDING, int N>
  __device__ __forceinline__ void give_back(float (&d)[N], const Slot& slot) const {
    wait_products<PENDING>(d);
    if (lane == 0) arrive(memory.empty + 8 * slot.index);
  }

  // d = 64 rows of X times those of Y.
  __device__ __forceinline__ void scores(float (&d)[Y_ROWS / 2], u32 x, const Slot& slot) const {
    const u64 a = descriptor(x, 16, 1024), b = descriptor(tile(slot), 16, 1024);
    fence_registers();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; ++i) {
      const int within = i % 4 * 32;
      multiply_rows(d, a + (i / 4 * X_HALF + within >> 4), b + (i / 4 * Y_HALF + within >> 4), i > 0);
    }
    commit();
  }

  // d (or 0) + the weights, as pairs, of 64 rows of X and of the i-th 16 rows of Y, times these rows of Y.
  __device__ __forceinline__ void add_16(float (&d)[64], const u32* weights, const Slot& slot, int i,
                                         int accumulate) const {
    multiply_columns(d, weights, descriptor(tile(slot), Y_HALF, 1024) + (i * 2048 >> 4), accumulate);
  }

  // The same for all rows of Y.
  __device__ __forceinline__ void add_up(float (&d)[64], const u32 (&weights)[Y_ROWS / 4], const Slot& slot,
                                         int accumulate) const {
    fence_registers();
#pragma unroll
    for (int i = 0; i < Y_ROWS / 16; ++i) add_16(d, weights + 4 * i, slot, i, accumulate || i > 0);
    commit();
  }

  // Sets the scores of keys that a row does not attend to to MASKED.
  __device__ __forceinline__ void mask(float (&s)[Y_ROWS / 2], int first_x, int first_y, int history) const {
    const int last_key = (MODE == KEY ? first_x + WARPGROUP_ROWS : first_y + Y_ROWS) - 1;
    const int first_row = MODE == KEY ? first_y : first_x;
    if (last_key <= first_row && last_key < history) return;
    const float masked = MASKED / p.half_alpha;
#pragma unroll
    for (int i = 0; i < Y_ROWS / 2; ++i) {
      const int x = first_x + warp * 16 + lane / 4 + i / 2 % 2 * 8, y = first_y + i / 4 * 8 + lane % 4 * 2 + i % 2;
      const int row = MODE == KEY ? y : x, key = MODE == KEY ? x : y;
      if (key > row || (key >= history && key != row)) s[i] = masked;
    }
  }

  __device__ __forceinline__ void zero(u32 tile, int half_bytes, int first_row, int rows) const {
    for (int i = first_row * 8 + threadIdx.x - 128; i < rows * 8; i += 256)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + half * half_bytes + i * 16), "r"(0)
                     : "memory");
  }

  // Zeroes rows past the sequence's end in the i-th item's first tiles of Y and in its X.
  __device__ __forceinline__ void zero_others(int i, const Item& item, const Tiles& tiles) const {
    const int y_rows = item.length - tiles.top * Y_ROWS;
    const int x_rows = MODE == KEY ? item.length - tiles.x_tile * X_ROWS : X_ROWS;
    if (y_rows >= Y_ROWS && x_rows >= X_ROWS) return;
    const Slot second = MODE == FORWARD ? y1 : second_of(y0);
    await(y0);
    await(second);
    zero(tile(y0), Y_HALF, y_rows, Y_ROWS);
    zero(tile(second), Y_HALF, y_rows, Y_ROWS);
    for (int j = 0; j < X_OPERANDS; ++j)
      zero(memory.x + (i % 2 * X_OPERANDS + j) * X_BYTES, X_HALF, x_rows, X_ROWS);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, 256;" ::: "memory");
  }

  // Rounds an item's sums, times an output's scale, to pairs.
  __device__ __forceinline__ void round(u32 (&pairs)[32], const float (&d)[64], int output) const {
    const float scale = p.scale[output];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      pairs[i] = pack(d[2 * i] * scale, d[2 * i + 1] * scale);
      asm volatile("" : "+r"(pairs[i])::"memory");  // not deferred until the store, which overlaps other products
    }
  }

  // Stores the warp's 16 rows via x, the warpgroup's rows of an operand of X that nothing reads any more.
  __device__ __forceinline__ void store(const u32 (&pairs)[32], u32 x, u32 item_address, int output) const {
    const Item item = item_at(item_address);
    const Tiles tiles(item);
    const int first_row = tiles.x_tile * X_ROWS + warpgroup * WARPGROUP_ROWS;
    const u64 stride = p.stride[output];
    const u32 at = (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 8; block += 2)
        write(x + half * X_HALF + (at ^ block << 4), pairs + 16 * half + 2 * block);
    }
    __syncwarp();
    u16* to = p.out[output] + u64(item.start) * stride + tiles.head * WIDTH + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int row = warp * 16 + i + lane / 8, token = first_row + (MODE == QUERY ? row_of_piece(row) : row);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 values = words_at(x + half * X_HALF + row * 128 + ((lane ^ row) % 8 << 4));
        if (token < item.length) *reinterpret_cast<uint4*>(to + u64(token) * stride + half * 64) = values;
      }
    }
  }

  __device__ __forceinline__ u32 x_of(int i) const {
    return memory.x + i % 2 * X_OPERANDS * X_BYTES + warpgroup * WARPGROUP_ROWS * 128;
  }
  __device__ __forceinline__ u32 item_of(int i) const { return memory.items + 32 * (i % 2); }

  // Waits for the i-th item; returns whether it exists.
  __device__ __forceinline__ bool begin(int i) const {
    wait(memory.x_full + 8 * (i % 2), i / 2 & 1);
    return item_at(item_of(i)).tile_and_head >= 0;
  }

  // Releases X of the i-th item, which its outputs were staged in.
  __device__ __forceinline__ void end(int i) const {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) arrive(memory.x_empty + 8 * (i % 2));
  }

  // The products of one tile's weights with v overlap the computation of the next tile's weights, and the store of an
  // item's outputs overlaps the next item's first scores.
  __device__ __forceinline__ void forward() {
    float out[64], s[Y_ROWS / 2];
    u32 weights[Y_ROWS / 4], rounded[32];
    int i = 0;
    for (; begin(i); ++i) {
      const Item item = item_at(item_of(i));
      const Tiles tiles(item);
      const int first_x = tiles.x_tile * X_ROWS + warpgroup * WARPGROUP_ROWS;
      zero_others(i, item, tiles);
      for (int tile = tiles.top; tile >= tiles.bottom; --tile) {
        const bool others = tile < tiles.top;
        await(y0);
        scores(s, x_of(i), y0);
        if (others) {
          await(y1);
          add_up(out, weights, y1, tile + 1 < tiles.top);
          give_back<1>(s, y0);
        } else {
          if (i > 0) store(rounded, x_of(i - 1), item_of(i - 1), 0);
          give_back<0>(s, y0);
          if (i > 0) end(i - 1);
        }
        y0.advance(2);
        mask(s, first_x, tile * Y_ROWS, item.history);
#pragma unroll
        for (float& score : s) {
          const float h = score * p.half_alpha;
          score = fmaf(h, fast_tanh(h), h);
        }
        if (others) {
          give_back<0>(out, y1);
          y1.advance(2);
        }
#pragma unroll
        for (int j = 0; j < Y_ROWS / 4; ++j) weights[j] = pack(s[2 * j], s[2 * j + 1]);
      }
      await(y1);
      add_up(out, weights, y1, tiles.bottom < tiles.top);
      give_back<0>(out, y1);
      y1.advance(2);
      round(rounded, out, 0);
    }
    if (i > 0) store(rounded, x_of(i - 1), item_of(i - 1), 0);
  }

  // Skips tiles of Y without a key that any of the warpgroup's 64 rows attends to.
  __device__ __forceinline__ void skip() {
    await(y0);
    await(second_of(y0));
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0) arrive(memory.empty + 8 * y0.index), arrive(memory.empty + 8 * second_of(y0).index);
    y0.advance(2);
  }

  // Releases the tiles before y0.
  template <int PENDING, int N>
  __device__ __forceinline__ void give_back_last(float (&d)[N]) const {
    const Slot last{(y0.index == 0 ? SLOTS : y0.index) - 2, 0};
    give_back<PENDING>(d, last);
    give_back<PENDING>(d, second_of(last));
  }

  // Stores the final sums of the i-th item.
  __device__ __forceinline__ void finish(const u32 (&rounded)[2][32], int i) const {
    store(rounded[0], x_of(i), item_of(i), 0);
    store(rounded[1], x_of(i) + X_BYTES, item_of(i), 1);
    end(i);
  }

  // Stores ds' of the warpgroup's keys: each thread's pairs of a key's 32 rows, 16 bytes for each 8 columns.
  __device__ __forceinline__ void store_piece(const u32 (&pairs)[Y_ROWS / 4], int piece) const {
    u16* to = p.pieces + u64(piece) * PIECE;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int below = i / 2, half = i % 2, key = warp * 16 + lane / 4 + below * 8, chunk = half * 4 + lane % 4;
      const u32* of_half = pairs + 8 * half + below;
      // As one store: the compiler would make four stores from registers that are not adjacent.
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + key * 64 + ((chunk ^ key % 8) << 3)),
                   "r"(of_half[0]), "r"(of_half[2]), "r"(of_half[4]), "r"(of_half[6])
                   : "memory");
    }
  }

  // Returns which of a sequence's 64 rows a piece has at this place.
  __device__ __forceinline__ int row_of_piece(int place) const {
    return (place / 32 * 4 + place % 8 / 2) * 8 + place % 32 / 8 * 2 + place % 2;
  }

  // Adds a tile to the sums, which begin with the FIRST tile of the i-th item; stores the previous item's
  // results while that tile's scores are computed. All registers are in use, so it waits for the sums.
  template <bool FIRST>
  __device__ __forceinline__ void add_tile(float (&of_keys)[64], float (&of_values)[64], const u32 (&rounded)[2][32],
                                           int i, int first_x, int tile, int history, int first_piece) {
    float s[Y_ROWS / 2], dw[Y_ROWS / 2];
    u32 weights[Y_ROWS / 4], slopes[Y_ROWS / 4];
    const Slot y1 = second_of(y0);
    await(y0);
    scores(s, x_of(i), y0);
    await(y1);
    scores(dw, x_of(i) + X_BYTES, y1);
    if (FIRST && i > 0) finish(rounded, i - 1);
    wait_products<1>(s);
    mask(s, first_x, tile * Y_ROWS, history);
#pragma unroll
    for (int j = 0; j < Y_ROWS / 16; ++j) {
#pragma unroll
      for (int k = 4 * j; k < 4 * j + 4; ++k) {
        float weight[2];
#pragma unroll
        for (int l = 0; l < 2; ++l) {
          const float h = s[2 * k + l] * p.half_alpha, t = fast_tanh(h), sigmoid = fmaf(0.5f, t, 0.5f);
          weight[l] = fmaf(h, t, h);
          s[2 * k + l] = fmaf(sigmoid, 1 - weight[l], weight[l]);  // silu'
        }
        weights[k] = pack(weight[0], weight[1]);
      }
      fence_registers();
      add_16(of_values, weights + 4 * j, y1, j, !FIRST || j > 0);
    }
    commit();
    wait_products<1>(dw);
#pragma unroll
    for (int j = 0; j < Y_ROWS / 16; ++j) {
#pragma unroll
      for (int k = 4 * j; k < 4 * j + 4; ++k) slopes[k] = pack(dw[2 * k] * s[2 * k], dw[2 * k + 1] * s[2 * k + 1]);
      fence_registers();
      add_16(of_keys, slopes + 4 * j, y0, j, !FIRST || j > 0);
    }
    commit();
    // A last piece whose rows all precede the warpgroup's keys would lie outside the sequence's pieces.
    if (tile * Y_ROWS >= first_x) store_piece(slopes, first_piece + tile * (tile + 1) / 2);
    y0.advance(2);
    wait_products<0>(of_values);
    give_back_last<0>(of_keys);
  }

  __device__ __forceinline__ void by_keys() {
    float of_keys[64], of_values[64];
    u32 rounded[2][32];
    int i = 0;
    for (; begin(i); ++i) {
      const Item item = item_at(item_of(i));
      const Tiles tiles(item);
      const int first_x = tiles.x_tile * X_ROWS + warpgroup * WARPGROUP_ROWS;
      const int first_piece = piece_of(item, 0, first_x / 64);
      zero_others(i, item, tiles);
      const bool skips_last = tiles.bottom * Y_ROWS < first_x && tiles.bottom < tiles.top;
      int tile = tiles.top;
      add_tile<true>(of_keys, of_values, rounded, i, first_x, tile, item.history, first_piece);
      while (--tile >= tiles.bottom + skips_last)
        add_tile<false>(of_keys, of_values, rounded, i, first_x, tile, item.history, first_piece);
      if (skips_last) skip();
      round(rounded[0], of_keys, 0);
      round(rounded[1], of_values, 1);
    }
    if (i > 0) finish(rounded, i - 1);
  }

  __device__ __forceinline__ void by_queries() {
    float sums[64];
    u32 rounded[32];
    for (int i = 0; begin(i); ++i) {
      const Item item = item_at(item_of(i));
      const Tiles tiles(item);
      zero_others(i, item, tiles);
      const bool skips_first = tiles.top * Y_ROWS > tiles.x_tile * X_ROWS + warpgroup * WARPGROUP_ROWS;
      if (skips_first) skip();
      const int top = tiles.top - skips_first;
      for (int step = top; step >= 0; --step) {
        await(y0);
        await(second_of(y0));
        const u64 a = descriptor(tile(second_of(y0)) + warpgroup * PIECE * 2, 16, 1024);
        const u64 b = descriptor(tile(y0), Y_HALF, 1024);
        fence_registers();
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply_columns(sums, a + (j * 2048 >> 4), b + (j * 2048 >> 4), step < top || j > 0);
        commit();
        if (step < top) give_back_last<1>(sums);
        y0.advance(2);
      }
      give_back_last<0>(sums);
      round(rounded, sums, 0);
      store(rounded, x_of(i), item_of(i), 0);
      end(i);
    }
  }

  __device__ __forceinline__ void consume() {
    if constexpr (MODE == FORWARD)
      forward();
    else if constexpr (MODE == KEY)
      by_keys();
    else
      by_queries();
  }
};
