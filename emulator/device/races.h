// Who accessed which bytes when, in shared memory and in what is watched of global memory.
//
// A granule remembers its last write, and the reads since then that are not ordered before a later one. It is of two
// bytes, or of one for kernels of 8-bit numbers, whose threads write neighbouring bytes.
// An access is a race where a conflicting one before it is not known to have happened (vector clocks).
#pragma once
#include "fibers.h"

namespace emu {

#ifndef EMU_GRANULE
#define EMU_GRANULE 2
#endif
constexpr uint GRANULE = EMU_GRANULE;

inline std::string describe(const Access& access, bool write) {
  static const char* const words[5][2] = {
      {"a read", "a write"},
      {"the read of a cp.async", "the write of a cp.async"},
      {"the read of a bulk store", "the write of a bulk store"},
      {"the read of a wgmma", "the write of a wgmma"},
      {"the read of a TMA load", "the write of a TMA load"}};
  return text("%s by %s at %s", words[access.kind][write], name(access.cluster, access.thread).c_str(),
              place(access.place).c_str());
}

[[noreturn]] inline void race(const std::string& bytes, const Access& before, bool before_writes, const Access& after,
                              bool writes, bool proxy) {
  std::string both = describe(after, writes) + "\n  after " + describe(before, before_writes);
  if (proxy) fail("missing proxy fence", bytes + ": no fence.proxy.async stands between\n  " + both);
  fail("race", bytes + ": nothing orders\n  " + both);
}

// Whether an access is known to have happened; `by_proxy`, also to the asynchronous proxy.
inline bool knows(const Thread& t, const Access& access, bool by_proxy = false) {
  const Knowledge* knowledge = &t.clocks;
  if (int(access.cluster) != t.cluster->number) {
    auto found = t.clocks.others.find(int(access.cluster));
    if (found == t.clocks.others.end()) return false;
    knowledge = &found->second;
  }
  return Knowledge::of(by_proxy ? knowledge->proxied : knowledge->known, access.agent) >= access.clock;
}

inline bool same_agent(const Access& one, const Access& other) {
  return one.agent == other.agent && one.cluster == other.cluster;
}

// One thread's, or an asynchronous operation's, access, issued by thread t; `where` puts a granule in words.
template <class Where>
inline void note_granules(Thread& t, std::vector<Granule>& shadow, size_t first, size_t bytes, bool writes,
                          const Access& me, Where where) {
  bool asynchronous = me.kind >= STORE;
  for (size_t g = first / GRANULE; g <= (first + bytes - 1) / GRANULE; ++g) {
    Granule& granule = shadow[g];
    const Access& last = granule.write;
    bool raced = last.place && !(last.strong && me.strong);
    if (raced && !knows(t, last)) race(where(g), last, true, me, writes, false);
    if (raced && asynchronous && !writes && last.kind <= COPY && !knows(t, last, true))
      race(where(g), last, true, me, writes, true);
    if (writes) {
      for (const Access& read : granule.reads)
        if (!(read.strong && me.strong) && !knows(t, read)) race(where(g), read, false, me, true, false);
      granule.reads.clear();
      granule.write = me;
      continue;
    }
    bool replaced = false;
    for (Access& read : granule.reads)
      if (same_agent(read, me) || (me.kind == GENERIC && read.strong == me.strong && knows(t, read))) {
        read = me;
        replaced = true;
        break;
      }
    if (!replaced) granule.reads.push_back(me);
  }
}

// What the thread knows is from here on visible to the asynchronous proxy.
void fence_proxy() {
  Thread& t = EMU_THREAD;
  did(t, FENCE);
  Knowledge::raise(t.clocks.proxied, t.clocks.known);
  for (auto& [number, knowledge] : t.clocks.others) Knowledge::raise(knowledge.proxied, knowledge.known);
  tick(t);
}

// What the thread knows is from here on passed on by its arrivals at the cluster's barrier, also by relaxed ones. That is
// more than PTX says, of which only the initialization of mbarriers is: here it is not told from other writes.
void fence_mbarrier_init() {
  fence_proxy();
  EMU_THREAD.released = EMU_THREAD.clocks;
}

}  // namespace emu
