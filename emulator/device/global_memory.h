// Global memory: bounds, flags between clusters, and the hooks that a kernel's own loads and stores call.
//
// Watched arrays remember who accessed what, as shared memory does. What a thread of one cluster knows reaches another
// only through a flag: it releases all it knows, and who acquires the flag afterwards knows it too. A thread that looks
// at a flag twice with nothing in between, and finds the same, goes on when the flag is written.
#pragma once
#include "shared_memory.h"

namespace emu {

inline GlobalArray& global_array(const Thread& t, const void* pointer, size_t bytes, const char* what) {
  check_previous(t);
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

inline int number_of(const GlobalArray& array) { return int(&array - machine.arrays.data()); }

// A store to what a caller gave: an operand stays as it is, and an output's element is one thread's in a launch, or is
// added to by any. Even where something orders two stores, one of them was for nothing.
inline void note_store(Thread& t, GlobalArray& array, const void* to, size_t bytes, bool adds, const void* from) {
  if (array.use == KEPT) return;
  size_t first = size_t(static_cast<const uchar*>(to) - array.base);
  if (array.use == OPERAND)
    fail("operand written", text("bytes 0x%zx to 0x%zx of argument %d, which is only read, are written by %s at %s", first,
                                 first + bytes - 1, number_of(array), name(t).c_str(), place(from).c_str()));
  constexpr uint ANY = ~0u;
  uint in_cluster = uint(t.cluster->threads.size());
  Stored me = {adds ? ANY : uint(t.cluster->number) * in_cluster + uint(t.id) + 1, place_number(from)};
  for (size_t element = first / array.use; element <= (first + bytes - 1) / array.use; ++element) {
    Stored& before = array.stored[element];
    if (before.thread && before.thread != me.thread) {
      bool added = before.thread == ANY;
      std::string by = added ? "some" : name(int((before.thread - 1) / in_cluster), int((before.thread - 1) % in_cluster));
      fail("stored twice", text("element %zu of argument %d is %s by %s at %s\n  after it was %s by %s at %s", element,
                                number_of(array), adds ? "added to" : "stored", name(t).c_str(), place(from).c_str(),
                                added ? "added to" : "stored", by.c_str(), place(before.place).c_str()));
    }
    before = me;
  }
}

inline void access_global(Thread& t, const void* pointer, size_t bytes, bool writes, const Access& me, const char* what,
                          bool adds = false) {
  GlobalArray& array = global_array(t, pointer, bytes, what);
  if (!me.strong) did(t, ACCESS, writes, number_of(array), static_cast<const uchar*>(pointer) - array.base, bytes);
  if (writes) note_store(t, array, pointer, bytes, adds, t.place);
  if (array.use != KEPT) return;
  int number = number_of(array);
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

inline void check_flag(Thread& t, const void* flag, bool writes, const char* what, bool adds = false) {
  check_aligned(t, uintptr_t(flag), sizeof(int), what);
  access_global(t, flag, sizeof(int), writes, access_by(t, GENERIC, uint(t.id), clock_of(t), true), what, adds);
  GlobalArray& array = global_array(t, flag, sizeof(int), what);
  ptrdiff_t place = static_cast<const uchar*>(flag) - array.base;
  if (writes) return did(t, ON_FLAG, adds, number_of(array), place);
  // A loop that looks until it finds something has looked once.
  if (t.deeds != t.deeds_at_look || t.look.at != flag) did(t, ON_FLAG, number_of(array), place);
  t.deeds_at_look = t.deeds;
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

// Behind a change of a flag others may go on first, also those of other clusters.
inline void perhaps_elsewhere(Thread& t, Flag& flag) {
  wake(flag.waiting);
  if (draw(2)) return;
  machine.elsewhere = true;
  leave(t);
}

// An addition leaves what was released to the flag before it there, as does every atomic operation.
void add_to_flag(int* to, int value, bool releases) {
  Thread& t = EMU_THREAD;
  check_flag(t, to, true, "red.global", true);
  Flag& flag = machine.flags[uintptr_t(to)];
  did(t, ON_FLAG, releases, value);
  if (releases) release_to(flag, t);
  *to += value;
  perhaps_elsewhere(t, flag);
}

void add_float(float* to, float value) {
  check_flag(EMU_THREAD, to, true, "red.global", true);
  *to += value;
}

void store_flag(int* to, int value, bool releases) {
  Thread& t = EMU_THREAD;
  check_flag(t, to, true, "st.global");
  Flag& flag = machine.flags[uintptr_t(to)];
  did(t, ON_FLAG, releases, value);
  flag.released.clear();
  if (releases) release_to(flag, t);
  *to = value;
  perhaps_elsewhere(t, flag);
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

inline bool lies_in(const Library& library, uintptr_t address) {
  return address - uintptr_t(library.first) < size_t(library.end - library.first);
}

// wgmma's registers are words of a thread's own memory: those it still adds to must not be touched, those it still reads
// must not be written. What is written now needs a wgmma.fence before it is wgmma's.
inline void use_registers(Thread& t, size_t at, size_t bytes, bool writes, const void* from) {
  for (size_t word = at / REGISTER; word <= (at + bytes - 1) / REGISTER; ++word) {
    Register& used = t.registers[word];
    if (used.lent > t.retired && (used.added_to || writes))
      fail("register in flight", "a register that wgmma still " + std::string(used.added_to ? "adds to is used" : "reads is written") +
                                     " by " + name(t) + " at " + place(from));
    if (writes) used.written = t.fences;
  }
}

inline void access_memory(const void* pointer, size_t bytes, bool writes, const void* from) {
  Thread& t = *machine.current;
  auto address = uintptr_t(pointer);
  if (address - uintptr_t(t.stack) < STACK) {
    if (t.fences) use_registers(t, address - uintptr_t(t.stack), bytes, writes, from);
    return;
  }
  t.place = from;
  ++t.steps;
  if (address - uintptr_t(machine.here->windows) < size_t(WINDOW) * machine.blocks) {
    perhaps_preempt(t);
    access_shared(t, shared_address(pointer), bytes, writes);
  } else if (!lies_in(machine.code, address) && !lies_in({&__ehdr_start, &_end}, address)) {
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
// An index beyond an array's end, of registers too, which have no addresses that could be told apart.
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(void*, void*) {
  emu::Thread& t = emu::entered(__builtin_return_address(0));
  emu::fail("out of bounds", "an index beyond its array" + emu::at(t));
}
}
#undef EMU_HOOK
