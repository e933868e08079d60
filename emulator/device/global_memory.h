// Global memory: bounds, flags between clusters, and the hooks that a kernel's own loads and stores call.
//
// Watched arrays remember who accessed what, as shared memory does. What a thread of one cluster knows reaches another
// only through a flag: it releases all it knows, and who acquires the flag afterwards knows it too. A thread that looks
// at a flag twice with nothing in between, and finds the same, goes on when the flag is written.
#pragma once
#include "shared_memory.h"

namespace emu {

inline GlobalArray& global_array(const Thread& t, const void* pointer, size_t bytes, const char* what) {
  auto address = static_cast<const uchar*>(pointer);
  for (GlobalArray& array : machine.arrays)
    if (address >= array.base && address + bytes <= array.base + array.bytes) return array;
  std::string nearest;
  for (const GlobalArray& array : machine.arrays)
    nearest += text("; argument %d begins %lld bytes before it and has %zu", int(&array - machine.arrays.data()),
                    (long long)(address - array.base), array.bytes);
  fail("out of bounds", text("%s of %zu bytes outside of every array, by %s at %s", what, bytes, name(t).c_str(),
                             place(t.place).c_str()) + nearest);
}

inline void access_global(Thread& t, const void* pointer, size_t bytes, bool writes, const Access& me, const char* what) {
  GlobalArray& array = global_array(t, pointer, bytes, what);
  if (array.shadow.empty()) return;
  int number = int(&array - machine.arrays.data());
  auto where = [number](size_t g) {
    return text("global memory bytes 0x%zx to 0x%zx of argument %d", g * GRANULE, g * GRANULE + GRANULE - 1, number);
  };
  note_granules(t, array.shadow, size_t(static_cast<const uchar*>(pointer) - array.base), bytes, writes, me, where);
}

inline void access_global(Thread& t, const void* pointer, size_t bytes, bool writes, const char* what) {
  access_global(t, pointer, bytes, writes, access_by(t, GENERIC, uint(t.id), clock_of(t)), what);
}

void store_global(void* to, const void* from, int bytes) {
  Thread& t = EMU_THREAD;
  check_aligned(t, uintptr_t(to), bytes, "st.global");
  access_global(t, to, bytes, true, "st.global");
  std::memcpy(to, from, bytes);
}

inline void check_flag(Thread& t, const int* flag, bool writes, const char* what) {
  check_aligned(t, uintptr_t(flag), sizeof *flag, what);
  access_global(t, flag, sizeof *flag, writes, access_by(t, GENERIC, uint(t.id), clock_of(t), true), what);
}

inline void release_to(Flag& flag, Thread& t) {
  for (auto& [number, knowledge] : t.clocks.others) flag.released[number].join(knowledge);
  flag.released[t.cluster->number].join(t.clocks);
  tick(t);
}

inline void acquire_from(const Flag& flag, Thread& t) {
  for (auto& [number, knowledge] : flag.released)
    (number == t.cluster->number ? static_cast<Knowledge&>(t.clocks) : t.clocks.others[number]).join(knowledge);
}

// An addition leaves what was released to the flag before it there, as does every atomic operation.
void add_to_flag(int* to, int value, bool releases) {
  Thread& t = EMU_THREAD;
  check_flag(t, to, true, "red.global");
  Flag& flag = machine.flags[uintptr_t(to)];
  if (releases) release_to(flag, t);
  *to += value;
  wake(flag.waiting);
}

void store_flag(int* to, int value, bool releases) {
  Thread& t = EMU_THREAD;
  check_flag(t, to, true, "st.global");
  Flag& flag = machine.flags[uintptr_t(to)];
  flag.released.clear();
  if (releases) release_to(flag, t);
  *to = value;
  wake(flag.waiting);
}

void load_flag(int& value, const int* from, bool acquires) {
  Thread& t = EMU_THREAD;
  check_flag(t, from, false, "ld.global");
  Flag& flag = machine.flags[uintptr_t(from)];
  if (looks_again(t, from, *from)) {
    t.detail = text("which is %d", *from);
    flag.waiting.push_back(&t);
    wait_here(t, AT_A_FLAG);
  }
  if (acquires) acquire_from(flag, t);
  value = *from;
}

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
  ++t.steps;
  if (address - uintptr_t(machine.here->windows) < size_t(WINDOW) * machine.blocks) {
    perhaps_preempt(t);
    access_shared(t, shared_address(pointer), bytes, writes);
  } else if (address - uintptr_t(&__ehdr_start) >= size_t(&_end - &__ehdr_start)) {
    perhaps_preempt(t);
    access_global(t, pointer, bytes, writes, writes ? "a write" : "a read");
  }
}

inline void access_aligned(const void* pointer, size_t bytes, bool writes, const void* from) {
  if (uintptr_t(pointer) % bytes) {
    entered(from);
    check_aligned(*machine.current, uintptr_t(pointer), bytes, writes ? "a write" : "a read");
  }
  access_memory(pointer, bytes, writes, from);
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
