// cp.async: copies that land between their issue and the wait that retires their group.
#pragma once
#include "barriers.h"

namespace emu {

inline void land(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.source_bytes);
  std::memset(copy.to + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

void cp_async(uint to, const void* from, int bytes, int source_bytes) {
  Thread& t = EMU_THREAD;
  check_aligned(t, to, bytes, "the destination of cp.async");
  did(t, ACCESS, bytes, source_bytes);
  if (source_bytes) {
    check_aligned(t, uintptr_t(from), bytes, "the source of cp.async");
    GlobalArray& array = global_array(t, from, source_bytes, "cp.async");
    did(t, ACCESS, number_of(array), static_cast<const uchar*>(from) - array.base);
  }
  Block& block = block_of(t);
  check_bounds(block, to, bytes, "a cp.async");
  note_access(t, block, to, bytes, true, access_by(t, COPY, numbered(t.copy_agent), t.committed + 1));
  Copy copy = {shared_pointer(t, to), static_cast<const uchar*>(from), bytes, source_bytes};
  if (now(EARLY)) land(copy);
  else t.open.push_back(copy);
}

void cp_async_commit() {
  Thread& t = EMU_THREAD;
  did(t, ON_GROUP);
  t.groups.push_back(std::move(t.open));
  t.open.clear();
  ++t.committed;
}

inline void retire_copies(Thread& t, size_t left) {
  for (; t.groups.size() > left; t.groups.pop_front())
    for (const Copy& copy : t.groups.front()) land(copy);
  if (t.copy_agent && t.committed >= left) t.clocks.set(t.copy_agent, t.committed - Clock(left));
}

void cp_async_wait(int left) {
  Thread& t = EMU_THREAD;
  did(t, ON_GROUP, left);
  retire_copies(t, left);
}

}  // namespace emu
