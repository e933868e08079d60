// Lanes of a warp together: __syncwarp, election, shuffles, votes; what a thread can ask of itself; and setmaxnreg.
#pragma once
#include "barriers.h"

namespace emu {

// Meet the lanes of a mask; the last one to come does `together` for all, with what each brought.
template <class Brought, class Together>
void warp_together(Thread& t, const char* what, uint mask, Brought& brought, Together together) {
  int warp = t.linear / LANES, lane = t.linear % LANES, first = t.id - lane;
  did(t, WARP, what[0], what[1], what[2], mask);
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

// griddepcontrol.wait: whoever knows of it knows that the kernel before is done.
void wait_for_previous() {
  Thread& t = EMU_THREAD;
  did(t, AWAIT_PREVIOUS);
  t.clocks.set(previous_kernel(*t.cluster), 1);
}

// setmaxnreg: a block has what its threads were launched with, and a pool of what its warps have given back. All warps of
// a group execute it; each goes on when the pool has what it asks for.
void change_registers(int count, bool more) {
  Thread& t = EMU_THREAD;
  Block& block = block_of(t);
  if (t.linear / GROUP >= machine.threads / GROUP) fail("setmaxnreg", "the thread is in no whole group of 128" + at(t));
  if (count % 8 || count < 24 || count > 256)
    fail("setmaxnreg", text("%d registers, which is no multiple of 8 from 24 to 256", count) + at(t));
  did(t, HOLD_REGISTERS, count, more);
  if (!machine.registers)
    fail("setmaxnreg", "it does nothing, as the launch bounds name no number of blocks for a multiprocessor" + at(t));
  int& has = block.registers[t.linear / LANES];
  warp_together(t, "setmaxnreg", ALL, count, [&](int* const*) {
    if (more ? count < has : count > has)
      fail("setmaxnreg", text("%s to %d registers of a warp that has %d", more ? "inc" : "dec", count, has) + at(t));
    if (more) return;
    block.pool += (has - count) * LANES;
    has = count;
    wake(block.awaiting_registers);
  });
  while (has < count) {
    int lacking = (count - has) * LANES;
    if (block.pool < lacking) {
      t.detail = text("%d registers a thread: its warp has %d, and lacks %d where the block's pool has %d", count, has,
                      lacking, block.pool);
      block.awaiting_registers.push_back(&t);
      wait_here(t, "setmaxnreg.inc");
      continue;
    }
    block.pool -= lacking;
    has = count;
  }
}

// At the end of a block: groups of which some warps took part and others did not.
inline void check_registers(const Block& block) {
  for (size_t warp = 0; warp + 3 < block.registers.size(); warp += 4)
    for (int other = 1; other < 4; ++other)
      if (block.registers[warp] != block.registers[warp + other])
        fail("setmaxnreg", text("warps %zu and %zu of block (%d, %d, %d) end with %d and %d registers a thread: all warps "
                                "of a group of 128 threads execute it", warp, warp + other, block.index.x, block.index.y,
                                block.index.z, block.registers[warp], block.registers[warp + other]));
}

}  // namespace emu
