// TMA: boxes of tensors to shared memory and back, swizzled and clipped; and bulk loads of bytes in a row.
#pragma once
#include "mbarrier.h"

namespace emu {

inline GlobalArray& array_of(const Thread& t, const CUtensorMap& map, const char* what) {
  size_t bytes = map.dims[0] * map.element_bytes;
  for (int d = 1; d < map.rank; ++d) bytes += (map.dims[d] - 1) * map.strides[d];
  return global_array(t, map.base, bytes, what);
}

// An H200 calls an illegal instruction what begins between pieces of 16 bytes, and a store that begins before the tensor.
inline void check_map(Thread& t, const CUtensorMap& map, const int* corner, int rank, uint address, const char* what) {
  check_previous(t);
  did(t, BOX, what[6], address);
  for (int d = 0; d < rank; ++d) did(t, BOX, corner[d]);
  if (map.rank != rank) fail("TMA", text("%s of %d dimensions with a map of %d", what, rank, map.rank) + at(t));
  check_aligned(t, inside(address), 128, what);
  array_of(t, map, what);
  if (int64_t(corner[0]) * map.element_bytes % 16)
    fail("TMA", text("%s from column %d on, elements of %d bytes: no multiple of 16 bytes", what, corner[0], map.element_bytes) + at(t));
}

// A shared address within a box, as the map swizzles it.
inline uint swizzled(const CUtensorMap& map, uint address) {
  uint bits = map.swizzle ? (16u << map.swizzle) - 16 : 0;
  return address ^ (address >> 3 & bits);
}

inline size_t bytes_of(const CUtensorMap& map) {
  size_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

// Rows of a swizzled box lie a swizzle's span apart, also where they are shorter; what lies between is left as it is.
inline int64_t row_bytes_of(const CUtensorMap& map) { return int64_t(map.box[0]) * map.element_bytes; }
inline int64_t pitch_of(const CUtensorMap& map) { return map.swizzle ? 16 << map.swizzle : row_bytes_of(map); }
inline int64_t rows_of(const CUtensorMap& map) { return int64_t(bytes_of(map)) / row_bytes_of(map); }

// What a box has of shared memory, as ranges of addresses.
template <class Take> void for_each_range(const CUtensorMap& map, uint address, Take take) {
  int64_t pitch = pitch_of(map), bytes = row_bytes_of(map), rows = rows_of(map);
  if (pitch == bytes) return take(address, size_t(rows * bytes));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t byte = 0; byte < bytes; byte += 16) take(swizzled(map, address + uint(row * pitch + byte)), size_t(16));
}

// Each 16-byte piece of a box, with its address in shared memory (swizzled by the address itself), the tensor's bytes
// or none where it is outside of the tensor, whose rows end after `columns`.
template <class Move> void for_each_piece(const Box& box, uint address, int64_t columns, Move move) {
  const CUtensorMap& map = box.map;
  int64_t width = row_bytes_of(map), pitch = pitch_of(map), rows = rows_of(map);
  for (int64_t row = 0; row < rows; ++row) {
    uchar* line = map.base;
    bool inside_tensor = true;
    for (int64_t d = 1, rest = row; d < map.rank; rest /= map.box[d], ++d) {
      int64_t position = box.corner[d] + rest % map.box[d];
      inside_tensor = inside_tensor && position >= 0 && position < map.dims[d];
      line += position * map.strides[d];
    }
    for (int64_t byte = 0; byte < width; byte += 16) {
      uint to = swizzled(map, address + uint(row * pitch + byte));
      for (int64_t e = byte; e < std::min(byte + 16, width); e += map.element_bytes) {
        int64_t column = box.corner[0] + e / map.element_bytes;
        bool there = inside_tensor && column >= 0 && column < columns;
        move(to + uint(e - byte), there ? line + column * map.element_bytes : nullptr);
      }
    }
  }
}

// A transfer of `bytes` to shared memory of the cluster's block of that rank, counted by an mbarrier there: `ranges`
// calls what it is given with each range of addresses, `move` does it, given the block's memory. Returns what it writes
// as.
template <class Ranges, class Move>
inline Access begin_transfer(Thread& t, int rank, size_t bytes, uint mbarrier, Ranges ranges, Move move) {
  uint remote = uint(rank + 1) << 24;
  Block& block = t.cluster->blocks[rank];
  MBarrier& m = mbarrier_at(t, remote | mbarrier);
  if (Knowledge::of(t.clocks.proxied, m.thread) < m.initialised)
    fail("missing proxy fence", text("mbarrier 0x%x counts a TMA load without a fence since its initialisation", mbarrier) + at(t));
  ranges([&](uint to, size_t size) { check_bounds(block, to, size, "a TMA load"); });
  Clock number = ++m.transfers;
  m.under_way.push_back(number);
  Access me = access_by(t, TRANSFER, m.agent, number);
  ranges([&](uint to, size_t size) { note_access(t, block, to, size, true, me); });
  uchar* window = block.window;
  int issuer = t.rank;
  std::string who = rank == t.rank ? "" : name(t) + at(t);
  auto complete = [move, window, &m, number, bytes, rank, issuer, who] {
    if (rank != issuer && !(living(rank) && living(issuer)))
      fail("cluster", "a load for another block comes when the threads of one of both have all ended, by " + who);
    move(window);
    m.under_way.erase(std::find(m.under_way.begin(), m.under_way.end(), number));
    m.bytes -= int64_t(bytes);
    perhaps_complete(m);
  };
  if (now(EARLY)) complete();
  else t.cluster->pending.push_back({complete});
  return me;
}

inline void begin_load(Thread& t, const Box& box, int rank, uint to, uint mbarrier) {
  auto ranges = [&](auto take) { for_each_range(box.map, to, take); };
  begin_transfer(t, rank, bytes_of(box.map), mbarrier, ranges, [box, to](uchar* window) {
    int size = box.map.element_bytes;
    for_each_piece(box, to, box.map.dims[0], [&](uint at, const uchar* from) {
      if (from) std::memcpy(window + at, from, size);
      else std::memset(window + at, 0, size);
    });
  });
}

// Bytes that lie in a row, to the block's own shared memory, or another block's of the cluster.
void load_bytes(uint to, const void* from, int bytes, uint mbarrier) {
  Thread& t = EMU_THREAD;
  did(t, BOX, to, bytes, mbarrier);
  check_aligned(t, inside(to), 16, "the destination of cp.async.bulk");
  check_aligned(t, uintptr_t(from), 16, "the source of cp.async.bulk");
  if (bytes <= 0 || bytes % 16) fail("TMA", text("a bulk load of %d bytes, no multiple of 16", bytes) + at(t));
  if (rank_of(t, to) != rank_of(t, mbarrier)) fail("cluster", "a bulk load and its mbarrier are of two blocks" + at(t));
  auto ranges = [&](auto take) { take(inside(to), size_t(bytes)); };
  Access me = begin_transfer(t, rank_of(t, to), size_t(bytes), inside(mbarrier), ranges,
                             [to, from, bytes](uchar* window) { std::memcpy(window + inside(to), from, size_t(bytes)); });
  access_global(t, from, size_t(bytes), false, me, "a bulk load");
}

inline Box box_of(const Thread& t, const CUtensorMap& map, const int* corner, const uchar* from, bool add) {
  Box box = {map, {}, from, add, t.place};
  std::copy(corner, corner + map.rank, box.corner);
  return box;
}

// Mask 0 is the thread's own block; otherwise each block of the mask gets the box, and its own mbarrier the bytes.
void load_box(uint to, const CUtensorMap& map, const int* corner, int rank, uint mbarrier, uint mask) {
  Thread& t = EMU_THREAD;
  check_map(t, map, corner, rank, to, "a TMA load");
  did(t, BOX, map.base - machine.arrays[0].base, mbarrier, mask);
  if (mask >> machine.blocks) fail("cluster", text("a multicast to 0x%x of %d blocks", mask, machine.blocks) + at(t));
  Box box = box_of(t, map, corner, nullptr, false);
  if (!mask) mask = 1u << rank_of(t, to);
  for (int r = 0; r < machine.blocks; ++r)
    if (mask >> r & 1) begin_load(t, box, r, inside(to), inside(mbarrier));
}

// Pieces of 16 bytes are stored whole where they begin inside the tensor, as an H200 does; additions are cut exactly.
inline void finish_store(Thread& t, const Box& box) {
  uint start = uint((box.from - machine.here->windows) % WINDOW);
  const uchar* window = box.from - start;
  int size = box.map.element_bytes;
  int64_t columns = box.map.dims[0], whole = 16 / size;
  if (!box.add) columns = (columns + whole - 1) / whole * whole;
  GlobalArray& array = array_of(t, box.map, "a TMA store");
  for_each_piece(box, start, columns, [&](uint at, uchar* to) {
    if (!to) return;
    if (to + size > array.base + array.bytes)
      fail("out of bounds", "a TMA store, in pieces of 16 bytes, ends beyond its array, by " + name(t) + " at " + place(box.place));
    note_store(t, array, to, size_t(size), box.add, box.place);
    if (!box.add) {
      std::memcpy(to, window + at, size);
    } else if (size == 4) {
      *(float*)to += *(const float*)(window + at);
    } else {
      *(half*)to = half(float(*(half*)to) + float(*(const half*)(window + at)));
    }
  });
}

void store_box(const CUtensorMap& map, const int* corner, int rank, uint from, bool add) {
  Thread& t = EMU_THREAD;
  check_map(t, map, corner, rank, from, "a TMA store");
  if (*std::min_element(corner, corner + rank) < 0) fail("TMA", "a store that begins before the tensor" + at(t));
  Access me = access_by(t, STORE, numbered(t.store_agent), t.stored + 1);
  for_each_range(map, from, [&](uint at, size_t size) {
    check_bounds(block_of(t), at, size, "a TMA store");
    note_access(t, block_of(t), at, size, false, me);
  });
  t.open_stores.push_back(box_of(t, map, corner, shared_pointer(t, from), add));
}

inline void retire_stores(Thread& t, size_t left) {
  for (; t.stores.size() > left; t.stores.pop_front())
    for (const Box& box : t.stores.front()) finish_store(t, box);
}

void bulk_commit() {
  Thread& t = EMU_THREAD;
  did(t, ON_GROUP);
  t.stores.push_back(std::move(t.open_stores));
  t.open_stores.clear();
  ++t.stored;
  if (now(EARLY)) retire_stores(t, 0);
}

// Retires all but the latest groups; awaiting only their reads makes no difference to shared memory.
void wait_for_stores(int left) {
  Thread& t = EMU_THREAD;
  did(t, ON_GROUP, left);
  retire_stores(t, left);
  if (t.store_agent && t.stored >= Clock(left)) t.clocks.set(t.store_agent, t.stored - left);
}

}  // namespace emu
