// The emulated machine: launching a kernel, and saying what went wrong.
#include <cstdarg>

#include "transfers.h"

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
std::string place(const void* address) {
  return text("<code 0x%zx>", size_t(static_cast<const char*>(address) - &__ehdr_start) - 1);
}

std::string name(const Thread& t) {
  const Index &b = block_of(t).index, &i = t.index;
  return text("thread (%d, %d, %d) of block (%d, %d, %d)", i.x, i.y, i.z, b.x, b.y, b.z);
}

void fail(const char* kind, const std::string& message) {
  machine.fault = std::string(kind) + "\n" + message;
  _longjmp(machine.launch, 1);
}

static Index index_in(int linear, const Index& extent) {
  return {linear % extent.x, linear / extent.x % extent.y, linear / extent.x / extent.y};
}

static void prepare_thread(int id) {
  Thread& t = machine.all[id];
  t = Thread();
  t.id = id;
  t.rank = id / machine.threads;
  t.linear = id % machine.threads;
  t.index = index_in(t.linear, machine.extent);
  t.stack = machine.stacks + STACK * id;
  t.status = READY;
  t.clocks.set(id, 1);
}

static void prepare_block(int rank, int number) {
  Block& block = machine.cluster[rank];
  std::vector<Granule> shadow = std::move(block.shadow);
  for (const Range& array : block.arrays)
    std::fill(shadow.begin() + array.low / GRANULE, shadow.begin() + (array.high + GRANULE - 1) / GRANULE, Granule());
  block = Block();
  block.shadow = std::move(shadow);
  block.shadow.resize(WINDOW / GRANULE);
  block.index = index_in(number, machine.grid);
  block.window = machine.windows + size_t(WINDOW) * rank;
  block.meetings.resize((machine.threads + LANES - 1) / LANES);
  block.warpgroups.resize((machine.threads + GROUP - 1) / GROUP);
  block.registers.resize(machine.threads / GROUP);
}

static void run_cluster(int first) {
  for (int rank = 0; rank < machine.blocks; ++rank) prepare_block(rank, first + rank);
  for (size_t id = 0; id < machine.all.size(); ++id) prepare_thread(int(id));
  machine.cluster_barrier = {};
  machine.cluster_phase = 0;
  machine.pending.clear();
  machine.next_agent = agent(TRANSFER, 0);
  accesses_left = 500 + draw(20000);
  schedule();
  for (Block& block : machine.cluster)
    for (auto& [address, m] : block.mbarriers)
      if (m.bytes) fail("mbarrier", "bytes are expected that never came, at the end: " + state_of(address, m));
}

static void run_grid() {
  int blocks = machine.grid.x * machine.grid.y * machine.grid.z;
  std::vector<int> order;
  for (int first = 0; first < blocks; first += machine.blocks) order.push_back(first);
  if (machine.random() % 4) std::shuffle(order.begin(), order.end(), machine.random);
  for (int first : order) run_cluster(first);
}

static void free_machine(size_t window_bytes, size_t stack_bytes) {
  if (machine.windows) munmap(machine.windows, window_bytes);
  if (machine.stacks) munmap(machine.stacks, stack_bytes);
}

}  // namespace emu

struct EmuLaunch {
  void (*kernel)(void**);
  void** arguments;
  const int *grid, *block;
  int cluster, completion, spurious, arrays;
  int64_t dynamic_bytes;
  uint64_t seed;
  uchar* const* bases;
  const int64_t* sizes;
};

// Launch a kernel; the fault's kind and text, divided by a line's end, or null where there was none.
extern "C" const char* emu_launch(const EmuLaunch* launch) {
  using namespace emu;
  machine = Machine();
  size_t threads = size_t(launch->block[0]) * launch->block[1] * launch->block[2];
  size_t window_bytes = size_t(WINDOW) * launch->cluster, stack_bytes = STACK * threads * launch->cluster;
  if (!_setjmp(machine.launch)) {
    machine.kernel = launch->kernel;
    machine.arguments = launch->arguments;
    machine.grid = gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
    machine.extent = blockDim = {launch->block[0], launch->block[1], launch->block[2]};
    machine.threads = int(threads);
    machine.blocks = launch->cluster;
    machine.dynamic_bytes = launch->dynamic_bytes;
    machine.completion = Completion(launch->completion);
    machine.spurious = launch->spurious;
    machine.random.seed(launch->seed);
    machine.leader = machine.random();
    for (int i = 0; i < launch->arrays; ++i)
      machine.arrays.push_back({launch->bases[i], size_t(launch->sizes[i])});
    machine.windows = map_memory(window_bytes);
    machine.stacks = map_memory(stack_bytes);
    machine.cluster.resize(launch->cluster);
    machine.all.resize(threads * launch->cluster);
    run_grid();
  }
  free_machine(window_bytes, stack_bytes);
  return machine.fault.empty() ? nullptr : machine.fault.c_str();
}
