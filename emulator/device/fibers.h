// Threads as fibers in one thread of the host, and the scheduler that chooses among those of a cluster.
//
// A fiber runs until it waits. Which one goes on is a matter of rank: at random moments (when none can go on, and now
// and then) ranks are drawn anew, warps shuffled, lanes in order, backwards or shuffled. So some warps run far ahead
// of others, in ever other ways, and a seed repeats it all.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>

#include "machine.h"

namespace emu {

inline void Ranks::shuffle(const Cluster& cluster) {
  int threads = machine.threads, warps = (threads + LANES - 1) / LANES;
  std::vector<int> chosen;
  for (int i = 0; i < warps * machine.blocks; ++i) chosen.push_back(i);
  bool ordered = draw(8) == 0;
  if (!ordered) std::shuffle(chosen.begin(), chosen.end(), machine.random);
  order.clear();
  for (int warp : chosen) {
    int first = warp % warps * LANES, last = std::min(first + LANES, threads), base = warp / warps * threads;
    size_t begin = order.size();
    for (int i = first; i < last; ++i) order.push_back(base + i);
    uint64_t lanes = draw(4);
    if (lanes == 1) std::reverse(order.begin() + begin, order.end());
    if (lanes == 2) std::shuffle(order.begin() + begin, order.end(), machine.random);
  }
  rank.assign(order.size(), 0);
  for (size_t i = 0; i < order.size(); ++i) rank[order[i]] = int(i);
  ready.assign(order.size() / 64 + 1, 0);
  for (const Thread& t : cluster.threads)
    if (t.status == READY) set(t.id);
}

static uint64_t accesses_left;

inline void leave(Thread& t) {
  if (!_setjmp(t.context)) _longjmp(machine.scheduler, 1);
}

void mark_ready(Thread& t) {
  t.status = READY;
  t.waits = nullptr;
  t.cluster->ranks.set(t.id);
}

void wait_here(Thread& t, const char* what) {
  t.status = BLOCKED;
  t.waits = what;
  t.cluster->ranks.unset(t.id);
  leave(t);
}

void wake(std::vector<Thread*>& waiting) {
  for (Thread* t : waiting) mark_ready(*t);
  waiting.clear();
}

// Called at each access to memory: now and then another thread goes on.
inline void perhaps_preempt(Thread& t) {
  if (--accesses_left) return;
  accesses_left = 500 + draw(20000);
  t.cluster->ranks.shuffle(*t.cluster);
  leave(t);
}

void finish(Thread& t);

static void run_fiber() {
  machine.kernel(machine.arguments);
  Thread& t = *machine.current;
  finish(t);
  t.status = DONE;
  t.cluster->ranks.unset(t.id);
  _longjmp(machine.scheduler, 1);
}

static ucontext_t home;

inline void start(Thread& t) {
  if (_setjmp(machine.scheduler)) return;
  ucontext_t begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = t.stack;
  begin.uc_stack.ss_size = STACK;
  begin.uc_link = &home;
  makecontext(&begin, run_fiber, 0);
  setcontext(&begin);
}

inline void resume(Thread& t) {
  if (!_setjmp(machine.scheduler)) _longjmp(t.context, 1);
}

constexpr const char* AT_A_FLAG = "a flag in global memory";
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

// What runs beside the threads gets on, one thing drawn; false where there is nothing.
inline bool complete_one(Cluster& cluster) {
  std::vector<Pending>& pending = cluster.pending;
  if (pending.empty()) return false;
  size_t chosen = draw(pending.size());
  Pending one = std::move(pending[chosen]);
  pending.erase(pending.begin() + chosen);
  one.complete();
  return true;
}

inline bool ended(const Cluster& cluster) {
  return std::all_of(cluster.threads.begin(), cluster.threads.end(), [](const Thread& t) { return t.status == DONE; });
}

inline bool awaits_a_flag(const Cluster& cluster) {
  return std::any_of(cluster.threads.begin(), cluster.threads.end(),
                     [](const Thread& t) { return t.status == BLOCKED && t.waits == AT_A_FLAG; });
}

// Run the cluster's threads as far as they get: to their end, until those left wait for other clusters, or to a change of
// a flag after which others go on first.
inline void run_threads(Cluster& cluster) {
  machine.here = &cluster;
  for (;;) {
    if (machine.elsewhere) {
      machine.elsewhere = false;
      return;
    }
    if (machine.completion == DRAWN && draw(8) == 0) complete_one(cluster);
    if (draw(64) == 0) cluster.ranks.shuffle(cluster);
    int id = cluster.ranks.first();
    if (id < 0) {
      if (ended(cluster)) {
        if (cluster.pending.empty()) return;
        fail("unawaited", "a TMA load, or an arrival of cp.async, comes after all threads have ended");
      }
      if (complete_one(cluster)) continue;
      if (awaits_a_flag(cluster)) return;
      fail("deadlock", "no thread can go on" + waiting_list(cluster));
    }
    machine.current = &cluster.threads[id];
    if (cluster.started[id]) {
      resume(*machine.current);
    } else {
      cluster.started[id] = true;
      start(*machine.current);
    }
  }
}

inline size_t stack_bytes() { return STACK * machine.threads * machine.blocks; }
inline size_t window_bytes() { return size_t(WINDOW) * machine.blocks; }
inline size_t register_bytes() { return stack_bytes() / REGISTER * sizeof(Register); }

inline uchar* map_memory(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("memory", "the host has no memory for the block's stacks");
  return static_cast<uchar*>(memory);
}

}  // namespace emu
