// The emulated machine: launching a kernel, and saying what went wrong.
#include <cstdarg>

#include "tensor_cores.h"
#include "tma.h"

emu::Index blockDim, gridDim;

namespace emu {

Machine machine;

std::string text(const char* format, ...) {
  char buffer[1024];
  va_list list;
  va_start(list, format);
  std::vsnprintf(buffer, sizeof buffer, format, list);
  va_end(list);
  return buffer;
}

// An address in the kernel's code, for the caller to make a line of; calls return behind what they are of.
uint place_number(const void* address) { return uint(static_cast<const char*>(address) - machine.code.first) - 1; }
std::string place(uint number) { return text("<code 0x%x>", number); }
std::string place(const void* address) { return place(place_number(address)); }

static Index index_in(int linear, const Index& extent) {
  return {linear % extent.x, linear / extent.x % extent.y, linear / extent.x / extent.y};
}

std::string name(int cluster, int thread) {
  Index b = index_in(cluster * machine.blocks + thread / machine.threads, machine.grid);
  Index i = index_in(thread % machine.threads, machine.extent);
  return text("thread (%d, %d, %d) of block (%d, %d, %d)", i.x, i.y, i.z, b.x, b.y, b.z);
}

std::string name(const Thread& t) { return name(t.cluster->number, t.id); }

void fail(const char* kind, const std::string& message) {
  machine.fault = std::string(kind) + "\n" + message;
  _longjmp(machine.launch, 1);
}

static void prepare_thread(Cluster& cluster, int id) {
  Thread& t = cluster.threads[id];
  t = Thread();
  t.cluster = &cluster;
  t.id = id;
  t.rank = id / machine.threads;
  t.linear = id % machine.threads;
  t.index = index_in(t.linear, machine.extent);
  t.stack = cluster.stacks + STACK * id;
  t.status = READY;
  t.clocks.set(id, 1);
}

static void prepare_block(Cluster& cluster, int rank) {
  Block& block = cluster.blocks[rank];
  std::vector<Granule> shadow = std::move(block.shadow);
  for (const Range& array : block.arrays)
    std::fill(shadow.begin() + array.low / GRANULE, shadow.begin() + (array.high + GRANULE - 1) / GRANULE, Granule());
  block = Block();
  block.shadow = std::move(shadow);
  block.index = index_in(cluster.number * machine.blocks + rank, machine.grid);
  block.window = cluster.windows + size_t(WINDOW) * rank;
  block.meetings.resize((machine.threads + LANES - 1) / LANES);
  block.warpgroups.resize((machine.threads + GROUP - 1) / GROUP);
  block.registers.assign((machine.threads + LANES - 1) / LANES, machine.registers);
}

static void forget_registers(Cluster& cluster) {
  if (cluster.registers) munmap(cluster.registers, register_bytes());
  cluster.registers = nullptr;
}

static void prepare_cluster(Cluster& cluster, int number) {
  cluster.number = number;
  forget_registers(cluster);
  for (int rank = 0; rank < machine.blocks; ++rank) prepare_block(cluster, rank);
  for (size_t id = 0; id < cluster.threads.size(); ++id) prepare_thread(cluster, int(id));
  cluster.started.assign(cluster.threads.size(), false);
  cluster.barrier = {};
  cluster.agents = previous_kernel(cluster) + 1;
  cluster.ranks.shuffle(cluster);
}

static Cluster& new_cluster() {
  Cluster& cluster = machine.clusters.emplace_back();
  cluster.windows = map_memory(window_bytes());
  cluster.stacks = map_memory(stack_bytes());
  cluster.blocks.resize(machine.blocks);
  cluster.threads.resize(size_t(machine.threads) * machine.blocks);
  return cluster;
}

// A thread has ended: what it began must be done, since the block's shared memory ends with it.
void finish(Thread& t) {
  if (t.lent > t.retired) fail("unawaited", "a wgmma is not awaited at the end of " + name(t));
  if (t.store_agent && (Knowledge::of(t.clocks.known, t.store_agent) < t.stored || !t.open_stores.empty()))
    fail("unawaited", "a bulk store's reads are not awaited at the end of " + name(t));
  retire_stores(t, 0);
  leave_barriers(t);
  did(t, BARRIER, t.cluster->number, t.id);
  machine.deeds += t.deeds;
  machine.accesses += mixed(t.accesses, machine.threads * t.cluster->number + t.id);
}

static void check_at_the_end(const Cluster& cluster) {
  for (const Block& block : cluster.blocks) {
    check_registers(block);
    for (auto& [address, m] : block.mbarriers)
      if (m.bytes) fail("mbarrier", "bytes are expected that never came, at the end: " + state_of(address, m));
  }
}

[[noreturn]] static void stand_still(const std::vector<Cluster*>& alive, size_t left) {
  std::string list;
  for (const Cluster* cluster : alive) list += waiting_list(*cluster);
  if (left) list += text("\n  and %zu blocks have not begun, as no more than %d are alive together", left * machine.blocks,
                         machine.resident * machine.blocks);
  fail("deadlock", "no thread can go on" + list);
}

// Clusters in a drawn order, each to its end or to a flag that it must wait for: then others begin or go on.
static void run_grid() {
  int clusters = machine.grid.x * machine.grid.y * machine.grid.z / machine.blocks;
  std::vector<int> order;
  for (int number = 0; number < clusters; ++number) order.push_back(number);
  if (machine.random() % 4) std::shuffle(order.begin(), order.end(), machine.random);
  std::vector<Cluster*> alive, free;
  for (size_t begun = 0; begun < order.size() || !alive.empty();) {
    std::vector<Cluster*> ready;
    std::copy_if(alive.begin(), alive.end(), std::back_inserter(ready), [](Cluster* c) { return c->ranks.first() >= 0; });
    bool room = begun < order.size() && alive.size() < size_t(machine.resident);
    if (ready.empty() && !room) stand_still(alive, order.size() - begun);
    Cluster* next = ready.empty() ? nullptr : ready[draw(ready.size())];
    if (!next || (room && draw(2))) {
      if (free.empty()) free.push_back(&new_cluster());
      next = free.back();
      free.pop_back();
      prepare_cluster(*next, order[begun++]);
      alive.push_back(next);
    }
    run_threads(*next);
    if (!ended(*next)) continue;
    check_at_the_end(*next);
    alive.erase(std::find(alive.begin(), alive.end(), next));
    free.push_back(next);
  }
}

static void free_machine() {
  for (Cluster& cluster : machine.clusters) {
    if (cluster.windows) munmap(cluster.windows, window_bytes());
    if (cluster.stacks) munmap(cluster.stacks, stack_bytes());
    forget_registers(cluster);
  }
  machine.clusters.clear();
  machine.arrays.clear();
}

}  // namespace emu

struct EmuLaunch {
  const emu::Library* code;
  void (*kernel)(void**);
  void** arguments;
  const int *grid, *block;
  int cluster, completion, spurious, overlaps, arrays, resident, registers, flushes;
  int64_t dynamic_bytes;
  uint64_t seed;
  uchar* const* bases;
  const int64_t* sizes;
  const int* uses;
};

// Launch a kernel; the fault's kind and text, divided by a line's end, or null where there was none.
extern "C" const char* emu_launch(const EmuLaunch* launch) {
  using namespace emu;
  machine = Machine();
  Flushing mode(launch->flushes);
  if (!_setjmp(machine.launch)) {
    machine.code = *launch->code;
    machine.kernel = launch->kernel;
    machine.arguments = launch->arguments;
    machine.grid = gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    machine.extent = blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    machine.threads = launch->block[0] * launch->block[1] * launch->block[2];
    machine.blocks = launch->cluster;
    machine.resident = std::max(1, launch->resident / launch->cluster);
    machine.registers = launch->registers;
    accesses_left = 500;
    machine.dynamic_bytes = launch->dynamic_bytes;
    machine.completion = Completion(launch->completion);
    machine.spurious = launch->spurious;
    machine.overlaps = launch->overlaps;
    machine.random.seed(launch->seed);
    machine.leader = machine.random();
    for (int i = 0; i < launch->arrays; ++i) {
      GlobalArray array = {launch->bases[i], size_t(launch->sizes[i]), launch->uses[i], {}, {}};
      if (array.use == KEPT) array.shadow.resize((array.bytes + GRANULE - 1) / GRANULE);
      if (array.use > 0) array.stored.resize(array.bytes / array.use);
      machine.arrays.push_back(std::move(array));
    }
    run_grid();
  }
  free_machine();
  return machine.fault.empty() ? nullptr : machine.fault.c_str();
}

// What the last launch's threads did, in digests: all of it, and what they accessed.
extern "C" uint64_t emu_deeds() { return emu::machine.deeds; }
extern "C" uint64_t emu_accesses() { return emu::machine.accesses; }
