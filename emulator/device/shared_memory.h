// Shared memory: addresses, bounds, allocation.
#pragma once
#include "races.h"

namespace emu {

uint shared_address(const void* pointer) {
  size_t offset = size_t(static_cast<const uchar*>(pointer) - machine.here->windows);
  if (offset >= size_t(WINDOW) * machine.blocks)
    fail("address", "an address outside of shared memory is converted to one in it at " + place(EMU_THREAD.place));
  uint rank = uint(offset / WINDOW), inside = uint(offset % WINDOW);
  return int(rank) == machine.current->rank ? inside : (rank + 1) << 24 | inside;
}

// The block that an address is of: the thread's own, or the one in its upper byte.
inline int rank_of(const Thread& t, uint address) { return address >> 24 ? int(address >> 24) - 1 : t.rank; }
inline uint inside(uint address) { return address & 0xffffff; }

void mapa(uint& to, uint address, uint rank) {
  Thread& t = EMU_THREAD;
  if (rank >= uint(machine.blocks)) fail("cluster", text("mapa names block %u of %d", rank, machine.blocks) + at(t));
  to = (rank + 1) << 24 | inside(address);
}

inline void check_bounds(const Block& block, uint address, size_t bytes, const char* what) {
  for (const Range& array : block.arrays)
    if (address >= array.low && address + bytes <= array.high) return;
  fail("out of bounds", text("%s of shared memory at 0x%x, %zu bytes, which no array has, by %s at %s", what, address,
                             bytes, name(*machine.current).c_str(), place(machine.current->place).c_str()));
}

// One thread's, or an asynchronous operation's, access to shared memory, issued by thread t.
inline void note_access(Thread& t, Block& block, uint address, size_t bytes, bool writes, const Access& me) {
  auto where = [&block](size_t g) {
    return text("shared memory bytes 0x%zx to 0x%zx of block (%d, %d, %d)", g * GRANULE, g * GRANULE + GRANULE - 1,
                block.index.x, block.index.y, block.index.z);
  };
  did(t, ACCESS, me.kind, writes, block.index.x, block.index.y, block.index.z, address, bytes);
  note_granules(t, block.shadow, address, bytes, writes, me, where);
}

inline int living(int rank) {
  int count = 0;
  for (Thread& t : machine.here->threads) count += t.rank == rank && t.status != DONE;
  return count;
}

// A block's shared memory ends with its threads: who uses another's must have it wait.
inline void check_lives(const Thread& t, uint address) {
  if (rank_of(t, address) != t.rank && !living(rank_of(t, address)))
    fail("cluster", "shared memory of a block whose threads have all ended is used" + at(t));
}

inline void access_shared(Thread& t, uint address, size_t bytes, bool writes) {
  check_lives(t, address);
  Block& block = t.cluster->blocks[rank_of(t, address)];
  check_bounds(block, inside(address), bytes, writes ? "a write" : "a read");
  note_access(t, block, inside(address), bytes, writes, access_by(t, GENERIC, uint(t.id), clock_of(t)));
}

inline uchar* shared_pointer(const Thread& t, uint address) {
  return t.cluster->windows + size_t(rank_of(t, address)) * WINDOW + inside(address);
}

inline void check_aligned(const Thread& t, uint64_t address, size_t bytes, const char* what) {
  if (address % bytes)
    fail("misaligned", text("%s at 0x%llx, which is no multiple of %zu bytes, by %s at %s", what,
                            (unsigned long long)address, bytes, name(t).c_str(), place(t.place).c_str()));
}

void store_shared(uint to, const void* from, int bytes) {
  Thread& t = EMU_THREAD;
  check_aligned(t, to, bytes, "st.shared");
  access_shared(t, to, bytes, true);
  std::memcpy(shared_pointer(t, to), from, bytes);
}

void load_shared(void* to, uint from, int bytes) {
  Thread& t = EMU_THREAD;
  check_aligned(t, from, bytes, "ld.shared");
  access_shared(t, from, bytes, false);
  std::memcpy(to, shared_pointer(t, from), bytes);
}

inline uint allocate(Block& block, uint from, size_t bytes, size_t alignment) {
  uint at = uint((from + alignment - 1) / alignment * alignment);
  if (at + bytes > WINDOW) fail("shared memory", text("%zu bytes more than a block can have", at + bytes - WINDOW));
  block.arrays.push_back({at, at + bytes});
  if (block.shadow.size() * GRANULE < at + bytes) block.shadow.resize((at + bytes + GRANULE - 1) / GRANULE);
  std::memset(block.window + at, 0xff, bytes);
  return at;
}

// Arrays lie a gap apart, so that what runs past one's end is out of bounds.
void* shared_array(int number, size_t bytes, size_t alignment) {
  constexpr uint GAP = 4096;
  Block& block = block_of(*machine.current);
  if (block.static_arrays.size() <= size_t(number)) block.static_arrays.resize(number + 1);
  uint& at = block.static_arrays[number];
  if (!at) at = allocate(block, block.arrays.empty() ? WINDOW_START : uint(block.arrays.back().high) + GAP, bytes, alignment);
  return block.window + at;
}

uchar* dynamic_shared() {
  Block& block = block_of(*machine.current);
  if (!block.dynamic)
    block.dynamic = allocate(block, block.arrays.empty() ? WINDOW_START : uint(block.arrays.back().high),
                             machine.dynamic_bytes, 16);
  return block.window + block.dynamic;
}

}  // namespace emu

