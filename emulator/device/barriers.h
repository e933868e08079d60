// What threads of a block, a warp or a cluster do together: barriers, votes, shuffles.
#pragma once
#include "global_memory.h"

namespace emu {

inline int living(int rank) {
  int count = 0;
  for (Thread& t : machine.here->threads) count += t.rank == rank && t.status != DONE;
  return count;
}

inline void open_barrier(NamedBarrier& barrier) {
  barrier.done = std::move(barrier.clocks);
  barrier.clocks = {};
  barrier.arrived = 0;
  for (Thread* t : barrier.waiting) t->clocks.join(barrier.done);
  wake(barrier.waiting);
}

// Arrive; with `wait`, go on when all expected have. What all did before is known to those who waited.
inline void meet(Thread& t, NamedBarrier& barrier, int expected, bool wait, const char* what) {
  if (barrier.arrived && barrier.expected != expected)
    fail("barrier", text("%s with %d threads meets one with %d, by %s at %s", what, expected, barrier.expected,
                         name(t).c_str(), place(t.place).c_str()));
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

void cluster_arrive() {
  Thread& t = EMU_THREAD;
  NamedBarrier& barrier = t.cluster->barrier;
  barrier.clocks.join(t.clocks);
  tick(t);
  if (++barrier.arrived < int(t.cluster->threads.size())) return;
  open_barrier(barrier);
}

// Waits for the phase that its own arrival, just before, was for.
void cluster_wait() {
  Thread& t = EMU_THREAD;
  NamedBarrier& barrier = t.cluster->barrier;
  if (barrier.arrived) {
    barrier.waiting.push_back(&t);
    wait_here(t, "barrier.cluster.wait");
  } else {
    t.clocks.join(barrier.done);
  }
}

// Meet the lanes of a mask; the last one to come does `together` for all, with what each brought.
template <class Brought, class Together>
void warp_together(Thread& t, const char* what, uint mask, Brought& brought, Together together) {
  int warp = t.linear / LANES, lane = t.linear % LANES, first = t.id - lane;
  int there = std::min(LANES, machine.threads - warp * LANES);
  if (there < LANES) mask &= (1u << there) - 1;
  if (!(mask >> lane & 1))
    fail("divergence", text("%s is not in the mask 0x%x of its own %s at %s", name(t).c_str(), mask, what,
                            place(t.place).c_str()));
  std::vector<Meeting>& meetings = block_of(t).meetings[warp];
  size_t i = 0;
  while (i < meetings.size() && meetings[i].mask != mask) ++i;
  if (i == meetings.size()) meetings.push_back({mask, what, 0, {}});
  Meeting& meeting = meetings[i];
  if (meeting.arrived && std::strcmp(meeting.what, what))
    fail("divergence", text("lanes of one warp meet at %s and, %s, at %s: %s", meeting.what, name(t).c_str(), what,
                            place(t.place).c_str()));
  meeting.what = what;
  meeting.lanes[lane] = &brought;
  if (++meeting.arrived < __builtin_popcount(mask)) {
    wait_here(t, what);
    return;
  }
  Brought* lanes[LANES] = {};
  for (int l = 0; l < there; ++l)
    if (mask >> l & 1) lanes[l] = static_cast<Brought*>(meeting.lanes[l]);
  meeting.arrived = 0;
  together(lanes);
  for (int l = 0; l < there; ++l)
    if (mask >> l & 1 && l != lane) mark_ready(machine.here->threads[first + l]);
}

constexpr uint ALL = 0xffffffffu;

void sync_warp(uint mask) {
  Thread& t = EMU_THREAD;
  Thread* self = &t;
  warp_together(t, "__syncwarp", mask, self, [](Thread** const* lanes) {
    Clocks all;
    for (int l = 0; l < LANES; ++l)
      if (lanes[l]) all.join((*lanes[l])->clocks);
    for (int l = 0; l < LANES; ++l)
      if (lanes[l]) {
        tick(**lanes[l]);
        (*lanes[l])->clocks.join(all);
      }
  });
}

// One lane, the same for the same mask each time; which, the seed says.
bool elected(uint mask) {
  Thread& t = EMU_THREAD;
  int leader = 0;
  warp_together(t, "elect.sync", mask, leader, [](int* const* lanes) {
    std::vector<int> there;
    for (int l = 0; l < LANES; ++l)
      if (lanes[l]) there.push_back(l);
    int chosen = there[machine.leader % there.size()];
    for (int l : there) *lanes[l] = chosen;
  });
  return leader == t.linear % LANES;
}

struct Shuffled { uint value, result; int from; };

uint shuffle(uint mask, uint value, int from, int width) {
  Thread& t = EMU_THREAD;
  int lane = t.linear % LANES;
  Shuffled mine = {value, 0, lane / width * width + ((from % width) + width) % width};
  warp_together(t, "shfl.sync", mask, mine, [](Shuffled* const* lanes) {
    for (int l = 0; l < LANES; ++l)
      if (lanes[l]) {
        if (!lanes[lanes[l]->from])
          fail("divergence", text("shfl.sync of lane %d reads lane %d, which takes no part", l, lanes[l]->from));
        lanes[l]->result = lanes[lanes[l]->from]->value;
      }
  });
  return mine.result;
}

uint ballot(uint mask, bool vote) {
  uint votes = vote;
  warp_together(EMU_THREAD, "vote.sync", mask, votes, [](uint* const* lanes) {
    uint all = 0;
    for (int l = 0; l < LANES; ++l) all |= lanes[l] && *lanes[l] ? 1u << l : 0;
    for (int l = 0; l < LANES; ++l)
      if (lanes[l]) *lanes[l] = all;
  });
  return votes;
}

int lane() { return machine.current->linear % LANES; }
Index thread_index() { return machine.current->index; }
Index block_index() { return block_of(*machine.current).index; }
int thread_rank() { return machine.current->linear; }
void trap() { fail("trap", "the kernel gives up, by " + name(EMU_THREAD) + " at " + place(machine.current->place)); }
// Each reading is a nanosecond after the one before.
uint64_t global_timer() { return ++machine.timer; }
uint cluster_rank() { return uint(machine.current->rank); }

std::string waiting_list(const Cluster& cluster) {
  std::string list;
  std::map<std::string, std::vector<int>> by_place;
  for (const Thread& t : cluster.threads)
    if (t.status == BLOCKED) {
      std::string at = place(t.place), detail = t.detail.empty() ? "" : " (" + t.detail + ")";
      by_place[text("of block (%d, %d, %d) waits at %s%s at %s", block_of(t).index.x, block_of(t).index.y,
                    block_of(t).index.z, t.waits, detail.c_str(), at.c_str())].push_back(t.linear);
    }
  for (auto& [where, threads] : by_place) {
    list += "\n  ";
    list += threads.size() == 1 ? text("thread %d ", threads[0])
                                : text("%zu threads, %d to %d, each ", threads.size(), threads.front(), threads.back());
    list += where;
  }
  return list;
}

}  // namespace emu
