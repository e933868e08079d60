// mbarriers, and what TMA moves: boxes of tensors to shared memory and back.
#pragma once
#include "tensor_cores.h"

namespace emu {

inline std::string state_of(uint address, const MBarrier& m) {
  return text("mbarrier 0x%x, phase %u: %u of %u arrivals and %lld bytes missing", address, m.phase, m.pending, m.count,
              (long long)m.bytes);
}

inline std::string at(const Thread& t) { return ", by " + name(t) + " at " + place(t.place); }

inline MBarrier& mbarrier_at(Thread& t, uint address) {
  auto& all = t.cluster->blocks[rank_of(t, address)].mbarriers;
  auto found = all.find(inside(address));
  if (found == all.end()) fail("mbarrier", text("no mbarrier was initialised at 0x%x", inside(address)) + at(t));
  MBarrier& m = found->second;
  if (rank_of(t, address) != t.rank && !living(rank_of(t, address)))
    fail("cluster", "shared memory of a block whose threads have all ended is used" + at(t));
  if (Knowledge::of(t.clocks.known, m.thread) < m.initialised)
    fail("race", text("mbarrier 0x%x is used before its initialisation is known to the user", inside(address)) + at(t));
  return m;
}

void mbarrier_init(uint address, uint count) {
  Thread& t = EMU_THREAD;
  check_aligned(t, address, 8, "an mbarrier");
  access_shared(t, address, 8, true);
  auto& all = block_of(t).mbarriers;
  if (all.count(address)) fail("mbarrier", text("0x%x is initialised twice", address) + at(t));
  if (!count) fail("mbarrier", text("0x%x expects no arrival", address) + at(t));
  MBarrier m = {};
  m.count = m.pending = count;
  m.agent = t.cluster->agents++;
  m.thread = t.id;
  m.initialised = clock_of(t);
  all.emplace(address, m);
}

void mbarrier_invalidate(uint address) {
  Thread& t = EMU_THREAD;
  mbarrier_at(t, address);
  block_of(t).mbarriers.erase(address);
}

// Open the phase where nothing is missing: what arrived, and the transfers that are done, are known to who waits.
inline void perhaps_complete(MBarrier& m) {
  if (m.pending || m.bytes) return;
  Clock first = m.transfers + 1;
  for (Clock one : m.under_way) first = std::min(first, one);
  m.released.join(m.arrivals);
  m.released.set(m.agent, first - 1);
  ++m.phase;
  m.pending = m.count;
  wake(m.waiting);
}

inline void arrive_for(Thread& t, MBarrier& m, uint address, uint count) {
  if (count > m.pending)
    fail("mbarrier", "more arrivals than it expects: " + state_of(inside(address), m) + at(t));
  m.arrivals.join(t.clocks);
  tick(t);
  m.pending -= count;
}

void arrive(uint address, uint count, uint expected_bytes, bool arrives) {
  Thread& t = EMU_THREAD;
  MBarrier& m = mbarrier_at(t, address);
  m.bytes += expected_bytes;
  if (arrives) arrive_for(t, m, address, count);
  perhaps_complete(m);
}

// A thread that only tests, and does so again with nothing in between, waits as others do.
void try_wait(bool& done, uint address, uint parity, bool blocking) {
  Thread& t = EMU_THREAD;
  MBarrier& m = mbarrier_at(t, address);
  if (rank_of(t, address) != t.rank) fail("mbarrier", "a wait on another block's mbarrier" + at(t));
  done = (m.phase & 1) != (parity & 1);
  bool again = looks_again(t, &m, m.phase);
  if (!done && (blocking ? machine.spurious && draw(8) == 0 : !again)) {
    t.cluster->ranks.shuffle(*t.cluster);
    leave(t);
    return;
  }
  while ((m.phase & 1) == (parity & 1)) {
    t.detail = text("parity %u of ", parity) + state_of(inside(address), m);
    m.waiting.push_back(&t);
    wait_here(t, "mbarrier.try_wait");
  }
  done = true;
  t.clocks.join(m.released);
}

void mapa(uint& to, uint address, uint rank) {
  Thread& t = EMU_THREAD;
  if (rank >= uint(machine.blocks)) fail("cluster", text("mapa names block %u of %d", rank, machine.blocks) + at(t));
  to = (rank + 1) << 24 | inside(address);
}

// What the thread knows is from here on visible to the asynchronous proxy.
void fence_proxy() {
  Thread& t = EMU_THREAD;
  Knowledge::raise(t.clocks.proxied, t.clocks.known);
  for (auto& [number, knowledge] : t.clocks.others) Knowledge::raise(knowledge.proxied, knowledge.known);
  tick(t);
}

// An arrival when the thread's earlier cp.async have landed; "noinc" (counted) takes one of the expected arrivals.
void arrive_after_copies(uint address, bool counted) {
  Thread& t = EMU_THREAD;
  MBarrier& m = mbarrier_at(t, address);
  if (!counted) ++m.pending;
  cp_async_commit();
  Clock group = t.committed;
  Thread* issuer = &t;
  auto complete = [issuer, group, address, &m] {
    size_t left = issuer->committed - group;
    if (issuer->groups.size() > left) retire_copies(*issuer, left);
    m.arrivals.join(issuer->clocks);
    if (!m.pending) fail("mbarrier", "more arrivals than it expects: " + state_of(inside(address), m));
    --m.pending;
    perhaps_complete(m);
  };
  if (now(EARLY)) complete();
  else t.cluster->pending.push_back({complete});
}

// An H200 calls an illegal instruction what begins between pieces of 16 bytes, and a store that begins before the tensor.
inline void check_map(Thread& t, const CUtensorMap& map, const int* corner, int rank, uint address, const char* what) {
  if (map.rank != rank) fail("TMA", text("%s of %d dimensions with a map of %d", what, rank, map.rank) + at(t));
  check_aligned(t, inside(address), 128, what);
  if (int64_t(corner[0]) * map.element_bytes % 16)
    fail("TMA", text("%s from column %d on, elements of %d bytes: no multiple of 16 bytes", what, corner[0], map.element_bytes) + at(t));
}

inline size_t bytes_of(const CUtensorMap& map) {
  size_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

// Each 16-byte piece of a box, with its address in shared memory (swizzled by the address itself), the tensor's bytes
// or none where it is outside of the tensor, whose rows end after `columns`.
template <class Move> void for_each_piece(const Box& box, uint address, int64_t columns, Move move) {
  const CUtensorMap& map = box.map;
  int64_t width = map.box[0] * map.element_bytes, rows = int64_t(bytes_of(map)) / width;
  uint swizzle = map.swizzle ? (16u << map.swizzle) - 16 : 0;
  for (int64_t row = 0; row < rows; ++row) {
    uchar* line = map.base;
    bool inside_tensor = true;
    for (int64_t d = 1, rest = row; d < map.rank; rest /= map.box[d], ++d) {
      int64_t position = box.corner[d] + rest % map.box[d];
      inside_tensor = inside_tensor && position >= 0 && position < map.dims[d];
      line += position * map.strides[d];
    }
    for (int64_t byte = 0; byte < width; byte += 16) {
      uint to = address + uint(row * width + byte);
      to ^= to >> 3 & swizzle;
      for (int64_t e = byte; e < std::min(byte + 16, width); e += map.element_bytes) {
        int64_t column = box.corner[0] + e / map.element_bytes;
        bool there = inside_tensor && column >= 0 && column < columns;
        move(to + uint(e - byte), there ? line + column * map.element_bytes : nullptr);
      }
    }
  }
}

// A transfer of `bytes` to shared memory of the cluster's block of that rank, counted by an mbarrier there; `move` does
// it, given the block's memory. Returns what it writes as.
template <class Move>
inline Access begin_transfer(Thread& t, int rank, uint to, size_t bytes, uint mbarrier, Move move) {
  uint remote = uint(rank + 1) << 24;
  Block& block = t.cluster->blocks[rank];
  MBarrier& m = mbarrier_at(t, remote | mbarrier);
  if (Knowledge::of(t.clocks.proxied, m.thread) < m.initialised)
    fail("missing proxy fence", text("mbarrier 0x%x counts a TMA load without a fence since its initialisation", mbarrier) + at(t));
  check_bounds(block, to, bytes, "a TMA load");
  Clock number = ++m.transfers;
  m.under_way.push_back(number);
  Access me = access_by(t, TRANSFER, m.agent, number);
  note_access(t, block, to, bytes, true, me);
  uchar* window = block.window;
  auto complete = [move, window, &m, number, bytes] {
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
  begin_transfer(t, rank, to, bytes_of(box.map), mbarrier, [box, to](uchar* window) {
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
  check_aligned(t, inside(to), 16, "the destination of cp.async.bulk");
  check_aligned(t, uintptr_t(from), 16, "the source of cp.async.bulk");
  if (bytes <= 0 || bytes % 16) fail("TMA", text("a bulk load of %d bytes, no multiple of 16", bytes) + at(t));
  if (rank_of(t, to) != rank_of(t, mbarrier)) fail("cluster", "a bulk load and its mbarrier are of two blocks" + at(t));
  Access me = begin_transfer(t, rank_of(t, to), inside(to), size_t(bytes), inside(mbarrier),
                             [to, from, bytes](uchar* window) { std::memcpy(window + inside(to), from, size_t(bytes)); });
  access_global(t, from, size_t(bytes), false, me, "a bulk load");
}

inline Box box_of(const CUtensorMap& map, const int* corner, const uchar* from, bool add) {
  Box box = {map, {}, from, add};
  std::copy(corner, corner + map.rank, box.corner);
  return box;
}

// Mask 0 is the thread's own block; otherwise each block of the mask gets the box, and its own mbarrier the bytes.
void load_box(uint to, const CUtensorMap& map, const int* corner, int rank, uint mbarrier, uint mask) {
  Thread& t = EMU_THREAD;
  check_map(t, map, corner, rank, to, "a TMA load");
  if (mask >> machine.blocks) fail("cluster", text("a multicast to 0x%x of %d blocks", mask, machine.blocks) + at(t));
  Box box = box_of(map, corner, nullptr, false);
  if (!mask) mask = 1u << rank_of(t, to);
  for (int r = 0; r < machine.blocks; ++r)
    if (mask >> r & 1) begin_load(t, box, r, inside(to), inside(mbarrier));
}

// Pieces of 16 bytes are stored whole where they begin inside the tensor, as an H200 does; additions are cut exactly.
inline void finish_store(const Box& box) {
  uint start = uint((box.from - machine.here->windows) % WINDOW);
  const uchar* window = box.from - start;
  int size = box.map.element_bytes;
  int64_t columns = box.map.dims[0], whole = 16 / size;
  if (!box.add) columns = (columns + whole - 1) / whole * whole;
  for_each_piece(box, start, columns, [&](uint at, uchar* to) {
    if (!to) return;
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
  check_bounds(block_of(t), from, bytes_of(map), "a TMA store");
  note_access(t, block_of(t), from, bytes_of(map), false, access_by(t, STORE, numbered(t.store_agent), t.stored + 1));
  t.open_stores.push_back(box_of(map, corner, shared_pointer(t, from), add));
}

inline void retire_stores(Thread& t, size_t left) {
  for (; t.stores.size() > left; t.stores.pop_front())
    for (const Box& box : t.stores.front()) finish_store(box);
}

void bulk_commit() {
  Thread& t = EMU_THREAD;
  t.stores.push_back(std::move(t.open_stores));
  t.open_stores.clear();
  ++t.stored;
  if (now(EARLY)) retire_stores(t, 0);
}

// Retires all but the latest groups; awaiting only their reads makes no difference to shared memory.
void wait_for_stores(int left) {
  Thread& t = EMU_THREAD;
  retire_stores(t, left);
  if (t.store_agent && t.stored >= Clock(left)) t.clocks.set(t.store_agent, t.stored - left);
}

// setmaxnreg: whole warpgroups share the block's 64 K registers; what is never given back is waited for in vain. From
// how many they start is the CUDA compiler's choice, so that inc and dec are not told apart.
void change_registers(int count) {
  Thread& t = EMU_THREAD;
  Block& block = block_of(t);
  if (t.linear / GROUP >= machine.threads / GROUP) fail("setmaxnreg", "the thread is in no whole group of 128" + at(t));
  if (count % 8 || count < 24 || count > 256)
    fail("setmaxnreg", text("%d registers, which is no multiple of 8 from 24 to 256", count) + at(t));
  block.registers[t.linear / GROUP] = count;
  int total = 0;
  for (int registers : block.registers) {
    if (!registers) return;
    total += registers * GROUP;
  }
  if (total > 65536) fail("setmaxnreg", text("%d registers in all, where a block has 65536", total) + at(t));
}

// A thread has ended: what it began must be done, since the block's shared memory ends with it.
void finish(Thread& t) {
  if (!t.in_flight.empty()) fail("unawaited", "a wgmma is not awaited at the end of " + name(t));
  if (t.store_agent && (Knowledge::of(t.clocks.known, t.store_agent) < t.stored || !t.open_stores.empty()))
    fail("unawaited", "a bulk store's reads are not awaited at the end of " + name(t));
  retire_stores(t, 0);
  leave_barriers(t);
}

}  // namespace emu
