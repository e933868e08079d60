// mbarriers: phases, arrivals, the bytes that transfers bring, and who waits for them.
#pragma once
#include "cp_async.h"

namespace emu {

inline std::string state_of(uint address, const MBarrier& m) {
  return text("mbarrier 0x%x, phase %u: %u of %u arrivals and %lld bytes missing", address, m.phase, m.pending, m.count,
              (long long)m.bytes);
}

inline MBarrier& mbarrier_at(Thread& t, uint address) {
  auto& all = t.cluster->blocks[rank_of(t, address)].mbarriers;
  auto found = all.find(inside(address));
  if (found == all.end()) fail("mbarrier", text("no mbarrier was initialised at 0x%x", inside(address)) + at(t));
  MBarrier& m = found->second;
  check_lives(t, address);
  if (Knowledge::of(t.clocks.known, m.thread) < m.initialised)
    fail("race", text("mbarrier 0x%x is used before its initialisation is known to the user", inside(address)) + at(t));
  return m;
}

void mbarrier_init(uint address, uint count) {
  Thread& t = EMU_THREAD;
  check_aligned(t, address, 8, "an mbarrier");
  access_shared(t, address, 8, true);
  did(t, ON_MBARRIER, address, count);
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

// At another block's mbarrier: what the thread knows now is known there whenever that comes. Nothing that it does later
// is held up by it, but what releases; and the block must be there.
inline void arrive_later(Thread& t, MBarrier& m, uint address, uint count, uint expected_bytes) {
  int rank = rank_of(t, address);
  Clocks told = t.clocks;
  std::string who = name(t) + at(t);
  tick(t);
  auto complete = [&m, address, count, expected_bytes, rank, told, who] {
    if (!living(rank)) fail("cluster", "an arrival at a block whose threads have all ended, by " + who);
    if (count > m.pending) fail("mbarrier", "more arrivals than it expects: " + state_of(inside(address), m) + ", by " + who);
    m.bytes += expected_bytes;
    m.arrivals.join(told);
    m.pending -= count;
    perhaps_complete(m);
  };
  t.cluster->pending.push_back({complete, &t});
}

void arrive(uint address, uint count, uint expected_bytes, bool arrives) {
  Thread& t = EMU_THREAD;
  MBarrier& m = mbarrier_at(t, address);
  did(t, ON_MBARRIER, address, count, expected_bytes, arrives);
  if (arrives && rank_of(t, address) != t.rank && !now(EARLY)) return arrive_later(t, m, address, count, expected_bytes);
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
  did(t, ON_MBARRIER, address, parity);
  done = true;
  t.clocks.join(m.released);
}

// An arrival when the thread's earlier cp.async have landed; "noinc" (counted) takes one of the expected arrivals.
void arrive_after_copies(uint address, bool counted) {
  Thread& t = EMU_THREAD;
  MBarrier& m = mbarrier_at(t, address);
  did(t, ON_MBARRIER, address, counted);
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

}  // namespace emu
