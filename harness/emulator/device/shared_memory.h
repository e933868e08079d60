// Shared memory: addresses, bounds, and who accessed which byte when.
//
// A granule of two bytes remembers its last write, and the reads since then that are not ordered before a later one.
// An access is a race where a conflicting one before it is not known to have happened (vector clocks).
#pragma once
#include "fibers.h"

namespace emu {

constexpr uint GRANULE = 2;

uint shared_address(const void* pointer) {
  size_t offset = size_t(static_cast<const uchar*>(pointer) - machine.windows);
  if (offset >= size_t(WINDOW) * machine.blocks)
    fail("address", "an address outside of shared memory is converted to one in it at " + place(EMU_THREAD.place));
  uint rank = uint(offset / WINDOW), inside = uint(offset % WINDOW);
  return int(rank) == machine.current->rank ? inside : (rank + 1) << 24 | inside;
}

// The block that an address is of: the thread's own, or the one in its upper byte.
inline int rank_of(const Thread& t, uint address) { return address >> 24 ? int(address >> 24) - 1 : t.rank; }
inline uint inside(uint address) { return address & 0xffffff; }

inline void check_bounds(const Block& block, uint address, size_t bytes, const char* what) {
  for (const Range& array : block.arrays)
    if (address >= array.low && address + bytes <= array.high) return;
  fail("out of bounds", text("%s of shared memory at 0x%x, %zu bytes, which no array has, by %s at %s", what, address,
                             bytes, name(*machine.current).c_str(), place(machine.current->place).c_str()));
}

inline std::string describe(const Access& access, bool write) {
  static const char* const words[5][2] = {
      {"a read", "a write"},
      {"the read of a cp.async", "the write of a cp.async"},
      {"the read of a bulk store", "the write of a bulk store"},
      {"the read of a wgmma", "the write of a wgmma"},
      {"the read of a TMA load", "the write of a TMA load"}};
  return text("%s by %s at %s", words[kind_of(access.agent)][write], name(machine.all[access.thread]).c_str(),
              place(access.place).c_str());
}

[[noreturn]] inline void race(const Block& block, size_t granule, const Access& before, bool before_writes,
                              const Access& after, bool writes, bool proxy) {
  std::string bytes = text("shared memory bytes 0x%zx to 0x%zx of block (%d, %d, %d)", granule * GRANULE,
                           granule * GRANULE + GRANULE - 1, block.index.x, block.index.y, block.index.z);
  std::string both = describe(after, writes) + "\n  after " + describe(before, before_writes);
  if (proxy) fail("missing proxy fence", bytes + ": no fence.proxy.async stands between\n  " + both);
  fail("race", bytes + ": nothing orders\n  " + both);
}

inline bool knows(const Thread& t, const Access& access) {
  return Clocks::of(t.clocks.known, access.agent) >= access.clock;
}

// One thread's, or an asynchronous operation's, access to shared memory, issued by thread t.
inline void note_access(Thread& t, Block& block, uint address, size_t bytes, bool writes, const Access& me) {
  bool asynchronous = kind_of(me.agent) >= STORE;
  for (size_t g = address / GRANULE; g <= (address + bytes - 1) / GRANULE; ++g) {
    Granule& granule = block.shadow[g];
    const Access& last = granule.write;
    if (last.place && !knows(t, last)) race(block, g, last, true, me, writes, false);
    if (asynchronous && !writes && last.place && kind_of(last.agent) <= COPY &&
        Clocks::of(t.clocks.proxied, last.agent) < last.clock)
      race(block, g, last, true, me, writes, true);
    if (writes) {
      for (const Access& read : granule.reads)
        if (!knows(t, read)) race(block, g, read, false, me, true, false);
      granule.reads.clear();
      granule.write = me;
      continue;
    }
    bool replaced = false;
    for (Access& read : granule.reads)
      if (read.agent == me.agent || (me.agent == uint(t.id) && knows(t, read))) {
        read = me;
        replaced = true;
        break;
      }
    if (!replaced) granule.reads.push_back(me);
  }
}

inline void access_shared(Thread& t, uint address, size_t bytes, bool writes) {
  Block& block = machine.cluster[rank_of(t, address)];
  check_bounds(block, inside(address), bytes, writes ? "a write" : "a read");
  note_access(t, block, inside(address), bytes, writes, {uint(t.id), clock_of(t), t.id, t.place});
}

inline uchar* shared_pointer(const Thread& t, uint address) {
  return machine.windows + size_t(rank_of(t, address)) * WINDOW + inside(address);
}

inline void check_aligned(const Thread& t, uint64_t address, size_t bytes, const char* what) {
  if (address % bytes)
    fail("misaligned", text("%s at 0x%llx, which is no multiple of %zu bytes, by %s at %s", what,
                            (unsigned long long)address, bytes, name(t).c_str(), place(t.place).c_str()));
}

inline void check_global(const Thread& t, const void* pointer, size_t bytes, const char* what) {
  auto address = static_cast<const uchar*>(pointer);
  for (const GlobalArray& array : machine.arrays)
    if (address >= array.base && address + bytes <= array.base + array.bytes) return;
  std::string nearest;
  for (const GlobalArray& array : machine.arrays)
    nearest += text("; argument %d begins %lld bytes before it and has %zu", int(&array - machine.arrays.data()),
                    (long long)(address - array.base), array.bytes);
  fail("out of bounds", text("%s of %zu bytes outside of every array, by %s at %s", what, bytes, name(t).c_str(),
                             place(t.place).c_str()) + nearest);
}

// What a kernel's own loads and stores call, since its text is compiled with the hooks of a race detector.
extern "C" char __ehdr_start, _end;

inline void access_memory(const void* pointer, size_t bytes, bool writes, const void* from) {
  Thread& t = *machine.current;
  auto address = uintptr_t(pointer);
  if (address - uintptr_t(t.stack) < STACK) {
    for (const Range& range : t.in_flight)
      if (address < range.high && address + bytes > range.low)
        fail("register in flight", "a register that wgmma still adds to is used by " + name(t) + " at " + place(from));
    if (writes && address < t.accumulators.high && address + bytes > t.accumulators.low) t.fenced = false;
    return;
  }
  t.place = from;
  if (address - uintptr_t(machine.windows) < size_t(WINDOW) * machine.blocks) {
    perhaps_preempt(t);
    access_shared(t, shared_address(pointer), bytes, writes);
  } else if (address - uintptr_t(&__ehdr_start) >= size_t(&_end - &__ehdr_start)) {
    perhaps_preempt(t);
    check_global(t, pointer, bytes, writes ? "a write" : "a read");
  }
}

inline void access_aligned(const void* pointer, size_t bytes, bool writes, const void* from) {
  if (uintptr_t(pointer) % bytes) {
    entered(from);
    check_aligned(*machine.current, uintptr_t(pointer), bytes, writes ? "a write" : "a read");
  }
  access_memory(pointer, bytes, writes, from);
}

void store_global(void* to, const void* from, int bytes) {
  Thread& t = EMU_THREAD;
  check_aligned(t, uintptr_t(to), bytes, "st.global");
  check_global(t, to, bytes, "st.global");
  std::memcpy(to, from, bytes);
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
  block.arrays.push_back({at, at + bytes, 0});
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

#define EMU_HOOK(bytes)                                                                                              \
  void __tsan_read##bytes(void* p) { emu::access_aligned(p, bytes, false, __builtin_return_address(0)); }            \
  void __tsan_write##bytes(void* p) { emu::access_aligned(p, bytes, true, __builtin_return_address(0)); }            \
  void __tsan_unaligned_read##bytes(void* p) { emu::access_memory(p, bytes, false, __builtin_return_address(0)); }   \
  void __tsan_unaligned_write##bytes(void* p) { emu::access_memory(p, bytes, true, __builtin_return_address(0)); }
extern "C" {
EMU_HOOK(1)
EMU_HOOK(2)
EMU_HOOK(4)
EMU_HOOK(8)
EMU_HOOK(16)
void __tsan_read_range(void* p, size_t bytes) { emu::access_memory(p, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t bytes) { emu::access_memory(p, bytes, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#undef EMU_HOOK
