// The state of the emulated machine: clusters, their threads, what these know, and how a fault ends a launch.
#pragma once
#include <csetjmp>
#include <cstdio>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernel.h"

namespace emu {

constexpr uint WINDOW = 256 << 10;  // addresses of one block's shared memory
constexpr uint WINDOW_START = 1024;  // where a kernel without static arrays finds its dynamic ones
constexpr size_t STACK = 256 << 10;
constexpr int LANES = 32, GROUP = 128;
constexpr size_t REGISTER = 4;  // bytes

// When what runs by itself (copies, wgmma, TMA) is done: at once, as late as it may be, or drawn.
enum Completion { EARLY, LATE, DRAWN };

typedef uint32_t Clock;

// While one lives, the processor flushes subnormal numbers to 0 (ftz), those of float64 as well, or does not. What it
// computes must be loaded and stored while it lives.
class Flushing {
 public:
  explicit Flushing(bool on) : before(__builtin_ia32_stmxcsr()) { set(on ? before | BOTH : before & ~BOTH); }
  ~Flushing() { set(before); }

 private:
  static constexpr uint BOTH = 0x8040;  // of results, and of operands
  static void set(uint mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
  uint before;
};

// What is known to have happened in a cluster: for each of its agents, up to which of its clock's ticks. Agents are the
// threads, and what runs beside them. `proxied` is what is visible to the asynchronous proxy, too.
struct Knowledge {
  std::vector<Clock> known, proxied;

  static void raise(std::vector<Clock>& mine, const std::vector<Clock>& other) {
    if (mine.size() < other.size()) mine.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) mine[i] = mine[i] > other[i] ? mine[i] : other[i];
  }
  static Clock of(const std::vector<Clock>& clocks, uint agent) { return agent < clocks.size() ? clocks[agent] : 0; }
  void join(const Knowledge& other) {
    raise(known, other.known);
    raise(proxied, other.proxied);
  }
};

// What a thread knows: of its own cluster, and of `others`, by their numbers, what it has been told through flags.
struct Clocks : Knowledge {
  std::map<int, Knowledge> others;

  void join(const Clocks& other) {
    Knowledge::join(other);
    for (auto& [number, knowledge] : other.others) others[number].join(knowledge);
  }
  void set(uint agent, Clock clock) {
    if (known.size() <= agent) known.resize(agent + 1);
    if (known[agent] < clock) known[agent] = clock;
  }
};

struct Range { uintptr_t low, high; };
// A word of a thread's own memory, as wgmma sees it: up to which group one adds to it or reads it, and behind how many of
// the thread's wgmma.fence it was last written. Below the first fence nothing is noted.
struct Register { Clock lent : 31, added_to : 1, written; };
struct Copy { uchar* to; const uchar* from; int bytes, source_bytes; };
struct Box { CUtensorMap map; int corner[5]; const uchar* from; bool add; const void* place; };

enum Status { READY, BLOCKED, DONE };

struct Cluster;
struct Look { const void *at, *place; int64_t value; uint64_t step; };

struct Thread {
  Cluster* cluster;
  int id, rank, linear;  // in the cluster; of its block in the cluster; in its block
  Index index;
  jmp_buf context;
  uchar* stack;
  Status status;
  const char* waits;          // what it does, in words, where it waits
  std::string detail;         // and on what exactly
  const void* place;          // in the kernel's code
  uint64_t steps;             // accesses to memory, and instructions of the emulator's
  Look look;                  // the last one at what it polls, and after how many steps it was
  Clocks clocks;
  Clocks released;            // what it knew at its last fence of mbarriers' initialization
  uint cluster_round;         // of the cluster's barrier, which it arrived for last
  bool at_cluster;            // and has not waited for since
  uint copy_agent, store_agent;  // what it issues; 0 before the first
  std::vector<Copy> open;     // cp.async not committed; then the committed groups
  std::deque<std::vector<Copy>> groups;
  Clock committed;
  std::vector<Box> open_stores;
  std::deque<std::vector<Box>> stores;
  Clock stored;
  Register* registers;           // of each word of its stack
  Clock fences, lent, retired;   // wgmma.fence so far; the last group that has registers; the last one awaited
  uint64_t deeds, accesses;      // digests of all it did, and of what it accessed
  uint64_t deeds_at_look;        // after its last look at a flag
};

struct Meeting { uint mask; const char* what; int arrived; void* lanes[LANES]; };

struct WgmmaOperation {
  Wgmma instruction;
  std::vector<float*> registers;  // of 128 threads, each count
  std::vector<const uint*> a;     // likewise, where A is in registers
  int count, warps;
  Clock group;
};

struct Warpgroup {
  uint agent;
  std::deque<WgmmaOperation> operations;
  size_t retired;         // operations that have been executed and left the front
  size_t issued[4];       // by each warp
  Clock committed[4];
  std::vector<Thread*> waiting;  // for a part that another warp has to issue
};

// A barrier's arrivals: in which of its rounds, and at which tick, each thread was last there.
struct Arrival { uint round; Clock clock; bool waits; };
struct NamedBarrier {
  int expected, arrived;
  Clocks clocks, done;
  std::vector<Thread*> waiting;
  uint round;
  std::map<int, Arrival> last;
};

struct MBarrier {
  uint count, pending, agent;
  int64_t bytes;           // expected and not yet arrived
  uint phase;              // phases completed
  Clock transfers;         // begun
  std::vector<Clock> under_way;
  Clocks arrivals, released;
  std::vector<Thread*> waiting;
  int thread;              // that initialised it, and when
  Clock initialised;
};

// Agents: threads, their cp.async and bulk stores, warpgroups' wgmma, and the transfers that mbarriers count.
enum Agent { GENERIC, COPY, STORE, WGMMA, TRANSFER };

// Of a thread, or of what it issued; `strong`: an atomic, release or acquire access, which races with none of its kind.
struct Access {
  uint agent = 0;
  Clock clock = 0;
  int thread = -1;
  uint cluster : 28, kind : 3, strong : 1;
  const void* place = nullptr;
};
struct Granule { Access write; std::vector<Access> reads; };

struct Block {
  Index index;
  uchar* window;
  std::vector<Range> arrays;       // allocated shared memory, as addresses in the window
  std::vector<uint> static_arrays;  // where each is
  uint dynamic;                    // where the dynamic part begins
  std::vector<Granule> shadow;
  std::vector<std::vector<Meeting>> meetings;  // of each warp
  std::vector<Warpgroup> warpgroups;
  std::vector<int> registers;      // of each warp's threads
  int pool;                        // registers that warps have given back
  std::vector<Thread*> awaiting_registers;
  std::map<int, NamedBarrier> barriers;
  std::map<uint, MBarrier> mbarriers;
};

// What is on its way within a cluster: a load, or an arrival at another block's mbarrier, which has its thread.
struct Pending { std::function<void()> complete; const Thread* arrives = nullptr; };

// What a launch may do to an array: read it; store elements of so many bytes, each by one thread; or, KEPT, whatever is
// ordered: memory that kernels keep for each other.
constexpr int OPERAND = 0, KEPT = -1;
struct Stored { uint thread, place; };  // who stored an element, counted from 1 over the grid, and where in the code
struct GlobalArray {
  uchar* base;
  size_t bytes;
  int use;                      // OPERAND, KEPT, or an output's bytes of an element
  std::vector<Granule> shadow;  // of what is kept
  std::vector<Stored> stored;   // of an output
};

// The order in which a cluster's threads go on; see fibers.h.
struct Ranks {
  std::vector<int> order, rank;
  std::vector<uint64_t> ready;  // bits by rank

  void shuffle(const Cluster& cluster);
  void set(int id) { ready[rank[id] / 64] |= uint64_t(1) << rank[id] % 64; }
  void unset(int id) { ready[rank[id] / 64] &= ~(uint64_t(1) << rank[id] % 64); }
  int first() const {
    for (size_t i = 0; i < ready.size(); ++i)
      if (ready[i]) return order[i * 64 + __builtin_ctzll(ready[i])];
    return -1;
  }
};

// Blocks that share a life: one, or a cluster of them.
struct Cluster {
  int number;  // in the grid
  std::vector<Block> blocks;
  std::vector<Thread> threads;
  std::vector<bool> started;
  NamedBarrier barrier;
  std::vector<Pending> pending;
  uint agents;
  Ranks ranks;
  uchar *windows = nullptr, *stacks = nullptr;
  Register* registers = nullptr;  // of the stacks' words, where a thread has multiplied by wgmma
};

// A word of global memory that threads of different clusters meet at: what its last writers have released with it.
struct Flag { std::map<int, Knowledge> released; std::vector<Thread*> waiting; };

struct Machine {
  int threads, blocks;  // of a block; of a cluster
  int resident;         // clusters that may be alive together
  int registers;        // that each thread is launched with; 0 where nobody says so
  Index extent, grid;
  size_t static_and_dynamic, dynamic_bytes;
  Library code;  // that of the kernel
  void (*kernel)(void**);
  void** arguments;
  std::vector<GlobalArray> arrays;
  std::deque<Cluster> clusters;  // those alive, and those ended, whose memory the next ones take
  std::map<uintptr_t, Flag> flags;
  Cluster* here;  // whose threads run
  Thread* current;
  std::mt19937_64 random;
  Completion completion;
  bool spurious;         // try_wait may fail for no reason
  uint64_t timer;
  uint64_t leader;       // which lane elect chooses
  bool overlaps;         // the kernel before it may still run
  bool elsewhere;        // another cluster goes on
  uint64_t deeds, accesses;  // of all threads that have ended
  jmp_buf scheduler, launch;
  std::string fault;
};

extern Machine machine;

inline uint64_t draw(uint64_t below) { return machine.random() % below; }
inline bool now(Completion always) {
  return machine.completion == always || (machine.completion == DRAWN && draw(2));
}

// The number of an agent beside the threads, which have the first ones; drawn at first use.
inline uint numbered(uint& agent) { return agent ? agent : agent = machine.here->agents++; }

[[noreturn]] void fail(const char* kind, const std::string& text);
std::string name(int cluster, int thread);
std::string name(const Thread& t);
std::string place(const void* address);
std::string place(uint number);
uint place_number(const void* address);
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
inline std::string at(const Thread& t) { return ", by " + name(t) + " at " + place(t.place); }

inline Block& block_of(const Thread& t) { return t.cluster->blocks[t.rank]; }
inline Clock clock_of(const Thread& t) { return t.clocks.known[t.id]; }
// What the thread did so far is told to others by what follows; what it does from now on is not.
inline void tick(Thread& t) { ++t.clocks.known[t.id]; }

inline Access access_by(const Thread& t, Agent kind, uint agent, Clock clock, bool strong = false) {
  return {agent, clock, t.id, uint(t.cluster->number), kind, strong, t.place};
}

// The thread that calls an instruction, whose place is noted for messages.
inline Thread& entered(const void* from) {
  machine.current->place = from;
  ++machine.current->steps;
  return *machine.current;
}
#define EMU_THREAD entered(__builtin_return_address(0))

// Whether a thread polls: it has looked at the same before, from the same place, and done nothing since.
inline bool looks_again(Thread& t, const void* at, int64_t value) {
  Look last = t.look;
  t.look = {at, t.place, value, t.steps};
  return last.at == at && last.place == t.place && last.value == value && last.step + 1 == t.steps;
}

// What threads do, in a digest: each access and instruction with its operands, but neither values nor registers. Two
// texts whose threads do the same access the same, and wait for the same, in the same order. Those before ORDERING do
// more than order others.
enum Deed { ACCESS, BOX, MULTIPLY, HOLD_REGISTERS, ORDERING, BARRIER, WARP, ON_GROUP, ON_MBARRIER, ON_FLAG, FENCE, AWAIT_PREVIOUS };

inline uint64_t mixed(uint64_t digest, uint64_t value) {
  digest = (digest ^ value) * 0x9e3779b97f4a7c15u;
  return digest ^ digest >> 29;
}
template <class... Operands> inline void did(Thread& t, Deed deed, Operands... operands) {
  uint64_t digest = deed;
  ((digest = mixed(digest, uint64_t(operands))), ...);
  t.deeds = mixed(t.deeds, digest);
  if (deed < ORDERING) t.accesses = mixed(t.accesses, digest);
}

// With programmatic dependent launch a thread may touch global memory only when it knows that somebody has waited for
// the kernel before, the agent behind the threads.
inline uint previous_kernel(const Cluster& cluster) { return uint(cluster.threads.size()); }
inline void check_previous(const Thread& t) {
  if (machine.overlaps && Knowledge::of(t.clocks.known, previous_kernel(*t.cluster)) < 1)
    fail("missing griddepcontrol.wait", "global memory is used before the kernel before has been waited for" + at(t));
}

// Fibers.
void wait_here(Thread& t, const char* what);
void wake(std::vector<Thread*>& waiting);
void mark_ready(Thread& t);

}  // namespace emu
