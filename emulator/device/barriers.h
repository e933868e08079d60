// Barriers of a block (all of it, or by number) and of a cluster; those in shared memory are in mbarrier.h.
#pragma once
#include "global_memory.h"

namespace emu {

inline void open_barrier(NamedBarrier& barrier) {
  barrier.done = std::move(barrier.clocks);
  barrier.clocks = {};
  barrier.arrived = 0;
  ++barrier.round;
  for (Thread* t : barrier.waiting) t->clocks.join(barrier.done);
  wake(barrier.waiting);
}

// Who arrives must know that the round before is over: else it might have been taken for one of that round's threads.
inline void check_round(Thread& t, NamedBarrier& barrier, bool wait, const char* what) {
  auto mine = barrier.last.find(t.id);
  if (mine == barrier.last.end() || !mine->second.waits || mine->second.round + 1 != barrier.round)
    for (auto& [id, arrival] : barrier.last)
      if (arrival.round + 1 == barrier.round && Knowledge::of(t.clocks.known, id) < arrival.clock)
        fail("barrier", text("nothing orders the arrival of %s at %s%s%s behind that of %s in the round before, by %s", name(t).c_str(),
                             what, t.detail.empty() ? "" : ", ", t.detail.c_str(), name(t.cluster->number, id).c_str(),
                             place(t.place).c_str()));
  barrier.last[t.id] = {barrier.round, clock_of(t), wait};
}

// Arrive; with `wait`, go on when all expected have. What all did before is known to those who waited.
inline void meet(Thread& t, NamedBarrier& barrier, int expected, bool wait, const char* what) {
  did(t, BARRIER, &barrier == &t.cluster->barrier, expected, wait);
  if (barrier.arrived && barrier.expected != expected)
    fail("barrier", text("%s with %d threads meets one with %d, by %s at %s", what, expected, barrier.expected,
                         name(t).c_str(), place(t.place).c_str()));
  check_round(t, barrier, wait, what);
  barrier.expected = expected;
  barrier.clocks.join(t.clocks);
  tick(t);
  if (wait) barrier.waiting.push_back(&t);
  if (++barrier.arrived < expected) {
    if (wait) wait_here(t, what);
    return;
  }
  open_barrier(barrier);
}

constexpr int WHOLE_BLOCK = 0;

void sync_block() {
  Thread& t = EMU_THREAD;
  meet(t, block_of(t).barriers[WHOLE_BLOCK], living(t.rank), true, "__syncthreads");
}

void sync_named(int barrier, int threads, bool wait) {
  Thread& t = EMU_THREAD;
  if (barrier < 0 || barrier > 15 || threads % LANES)
    fail("barrier", text("barrier %d with %d threads, by %s at %s: there are 16, for whole warps", barrier, threads,
                         name(t).c_str(), place(t.place).c_str()));
  did(t, BARRIER, barrier);
  t.detail = text("barrier %d", barrier);
  meet(t, block_of(t).barriers[barrier], threads ? threads : living(t.rank), wait, "bar.sync");
}

// A thread that ends is no longer waited for by the others of its block.
inline void leave_barriers(Thread& t) {
  auto found = block_of(t).barriers.find(WHOLE_BLOCK);
  if (found == block_of(t).barriers.end() || !found->second.arrived) return;
  NamedBarrier& barrier = found->second;
  if (barrier.arrived == --barrier.expected) open_barrier(barrier);
}

// What a thread has said to other blocks is there before what it releases.
inline void finish_arrivals(Thread& t) {
  std::vector<Pending>& pending = t.cluster->pending;
  for (size_t i = 0; i < pending.size();)
    if (pending[i].arrives == &t) {
      Pending one = std::move(pending[i]);
      pending.erase(pending.begin() + i);
      one.complete();
      i = 0;
    } else {
      ++i;
    }
}

// A relaxed arrival passes on what a fence before it released, and nothing else that its thread did: what that says to
// other blocks' mbarriers may come later.
void arrive_at_cluster(bool releases) {
  Thread& t = EMU_THREAD;
  did(t, BARRIER, true);
  NamedBarrier& barrier = t.cluster->barrier;
  if (t.at_cluster) fail("barrier", "a second arrival at the cluster's barrier, without a wait between, by " + name(t) + at(t));
  t.at_cluster = true;
  t.cluster_round = barrier.round;
  if (releases) finish_arrivals(t);
  barrier.clocks.join(releases ? t.clocks : t.released);
  tick(t);
  if (++barrier.arrived < int(t.cluster->threads.size())) return;
  open_barrier(barrier);
}

// Waits for the round that its own last arrival was for; others may have arrived for the next by then.
void cluster_wait() {
  Thread& t = EMU_THREAD;
  did(t, BARRIER, false);
  NamedBarrier& barrier = t.cluster->barrier;
  if (!t.at_cluster) fail("barrier", "a wait at the cluster's barrier, without an arrival before it, by " + name(t) + at(t));
  t.at_cluster = false;
  if (barrier.round == t.cluster_round) {
    barrier.waiting.push_back(&t);
    wait_here(t, "barrier.cluster.wait");
  } else {
    t.clocks.join(barrier.done);
  }
}

}  // namespace emu
