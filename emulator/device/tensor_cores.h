// Matrix instructions of a warp and of a warpgroup. Layouts: PTX ISA, "Matrix fragments for mma.m16n8k16", "Matrix
// fragments for mma.m16n8k8", "Asynchronous warpgroup level matrix instructions".
#pragma once
#include "warps.h"

namespace emu {

inline float operand(Type type, const uchar* from) {
  if (type == TF32) {  // the instruction ignores the bits that TF32 has not
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    return float_of(bits & 0xffffe000);
  }
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return type == F16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

struct MatrixMove { Thread* thread; uint* const* to; const uint* from; uint address; int count; bool transposed; };

// Piece p has the rows that lanes 8p to 8p + 7 point at; lane l holds elements 2 (l % 4) and the next of row l / 4,
// or transposed, of column l / 4.
inline void move_matrices(MatrixMove* const* lanes, bool stores) {
  MatrixMove& first = *lanes[0];
  for (int piece = 0; piece < first.count; ++piece) {
    uchar* rows[8];
    for (int row = 0; row < 8; ++row) {
      MatrixMove& pointing = *lanes[piece * 8 + row];
      check_aligned(*pointing.thread, pointing.address, 16, stores ? "a row of stmatrix" : "a row of ldmatrix");
      access_shared(*pointing.thread, pointing.address, 16, stores);
      rows[row] = shared_pointer(*pointing.thread, pointing.address);
    }
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 2; ++e) {
        int down = l / 4, right = l % 4 * 2 + e;
        uchar* element = first.transposed ? rows[right] + 2 * down : rows[down] + 2 * right;
        if (stores) std::memcpy(element, (const uchar*)&lanes[l]->from[piece] + 2 * e, 2);
        else std::memcpy((uchar*)lanes[l]->to[piece] + 2 * e, element, 2);
      }
  }
}

void load_matrices(uint* const* to, int count, bool transposed, uint address) {
  Thread& t = EMU_THREAD;
  MatrixMove move = {&t, to, nullptr, address, count, transposed};
  for (int r = 0; r < count; ++r) access_memory(to[r], REGISTER, true, t.place);  // wgmma may have them, or read them next
  warp_together(t, "ldmatrix", ALL, move, [](MatrixMove* const* lanes) { move_matrices(lanes, false); });
}

void store_matrices(uint address, const uint* from, int count, bool transposed) {
  Thread& t = EMU_THREAD;
  MatrixMove move = {&t, nullptr, from, address, count, transposed};
  warp_together(t, "stmatrix", ALL, move, [](MatrixMove* const* lanes) { move_matrices(lanes, true); });
}

struct Multiplication { Type type; int depth; float* const* d; const uint *a, *b; const float* c; };

// 16 rows, 8 columns, `depth` steps; nothing is flushed. A register holds 32 bits of operands, along k: lane l those of row or column
// l / 4. Registers of A go down 8 rows first, then on along k; those of B along k.
inline void multiply_lanes(Multiplication* const* lanes) {
  Flushing none(false);
  Type type = lanes[0]->type;
  int depth = lanes[0]->depth, size = type == TF32 ? 4 : 2, packed = 4 / size;
  float a[16][16], b[16][8];
  for (int l = 0; l < LANES; ++l)
    for (int r = 0; r < depth / packed / 2; ++r)
      for (int e = 0; e < packed; ++e) {
        int k = l % 4 * packed + e;
        a[l / 4 + r % 2 * 8][k + r / 2 * 4 * packed] = operand(type, (const uchar*)&lanes[l]->a[r] + e * size);
        if (r < depth / packed / 4) b[k + r * 4 * packed][l / 4] = operand(type, (const uchar*)&lanes[l]->b[r] + e * size);
      }
  for (int l = 0; l < LANES; ++l)
    for (int r = 0; r < 4; ++r) {
      int row = l / 4 + r / 2 * 8, column = l % 4 * 2 + r % 2;
      float sum = lanes[l]->c[r];
      for (int k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
      *lanes[l]->d[r] = sum;
    }
}

void multiply_warp(Type type, int depth, float* const* d, const uint* a, const uint* b, const float* c) {
  Multiplication mine = {type, depth, d, a, b, c};
  warp_together(EMU_THREAD, "mma.sync", ALL, mine, multiply_lanes);
}

// A matrix descriptor: start, leading and stride offsets in units of 16 bytes, and the width of swizzled rows.
struct Descriptor {
  uint start, leading, stride, width;
  explicit Descriptor(uint64_t bits)
      : start(uint(bits & 0x3fff) << 4),
        leading(uint(bits >> 16 & 0x3fff) << 4),
        stride(uint(bits >> 32 & 0x3fff) << 4),
        width(bits >> 62 ? 256u >> (bits >> 62) : 16) {}

  // Where element (other, along k) of 16-bit operands lies, its 16-byte pieces permuted by the address itself.
  uint address(int other, int k, bool k_major) const {
    uint at;
    if (k_major) {
      uint bytes = uint(k) * 2;
      at = start + other / 8 * stride + other % 8 * width + bytes / width * leading + bytes % width;
    } else {
      uint bytes = uint(other) * 2, across = width == 16 ? stride : leading, down = width == 16 ? leading : stride;
      at = start + bytes / width * across + bytes % width + k / 8 * down + k % 8 * width;
    }
    return at ^ (at >> 3 & (width - 16) & 0x70);
  }
};

inline Warpgroup& warpgroup_of(Thread& t) {
  if (t.linear / GROUP * GROUP + GROUP > machine.threads)
    fail("wgmma", name(t) + " is in no whole group of 128 threads, at " + place(t.place));
  return block_of(t).warpgroups[t.linear / GROUP];
}

// Note a warp's reads from shared memory: 16 rows of A, all columns of B; a row of 16 elements is one access of what is
// contiguous.
inline void note_operands(Thread& t, const Wgmma& w, Clock group, int warp) {
  Access me = access_by(t, WGMMA, numbered(warpgroup_of(t).agent), group);
  Block& block = block_of(t);
  auto note = [&](const Descriptor& d, int first, int last, bool k_major) {
    for (int other = first; other < last; other += k_major ? 1 : 8)
      for (int k = 0; k < 16; k += k_major ? 8 : 1) {
        uint at = d.address(other, k, k_major);
        check_bounds(block, at, 16, "a read by wgmma");
        note_access(t, block, at, 16, false, me);
      }
  };
  if (w.a != IN_REGISTERS) note(Descriptor(w.a), warp * 16, warp * 16 + 16, !w.transpose_a);
  note(Descriptor(w.b), 0, w.columns, !w.transpose_b);
}

// Element (row, k) of A, in shared memory or in a thread's registers, two in each: 8 rows down first, then on along k.
inline const uchar* element_of_a(const WgmmaOperation& operation, const Block& block, int row, int k) {
  const Wgmma& w = operation.instruction;
  if (w.a != IN_REGISTERS) return block.window + Descriptor(w.a).address(row, k, !w.transpose_a);
  int thread = row / 16 * LANES + row % 8 * 4 + k % 8 / 2, r = row % 16 / 8 + k / 8 * 2;
  return (const uchar*)operation.a[size_t(thread) * A_REGISTERS + r] + k % 2 * 2;
}

inline void execute(WgmmaOperation& operation, const Block& block) {
  Flushing none(false);
  const Wgmma& w = operation.instruction;
  Descriptor b(w.b);
  std::vector<float> left(64 * 16), right(size_t(16) * w.columns);
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 64; ++i) left[i * 16 + k] = w.scale_a * operand(w.type, element_of_a(operation, block, i, k));
    for (int j = 0; j < w.columns; ++j)
      right[k * w.columns + j] = w.scale_b * operand(w.type, block.window + b.address(j, k, !w.transpose_b));
  }
  std::vector<float> row(w.columns);
  for (int i = 0; i < 64; ++i) {
    auto registers = [&](int j) -> float& {
      int thread = i / 16 * 32 + i % 8 * 4 + j % 8 / 2, r = j / 8 * 4 + i % 16 / 8 * 2 + j % 2;
      return *operation.registers[size_t(thread) * operation.count + r];
    };
    for (int j = 0; j < w.columns; ++j) row[j] = w.accumulate ? registers(j) : 0;
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < w.columns; ++j) row[j] += left[i * 16 + k] * right[k * w.columns + j];
    for (int j = 0; j < w.columns; ++j) registers(j) = row[j];
  }
}

// Execute what all four warps have issued, up to a group; false where a warp has not issued its part yet.
inline bool execute_up_to(Warpgroup& group, const Block& block, Clock last) {
  while (!group.operations.empty() && group.operations.front().group <= last) {
    if (group.operations.front().warps < 4) return false;
    execute(group.operations.front(), block);
    group.operations.pop_front();
    ++group.retired;
  }
  return true;
}

struct Issue { Thread* thread; const Wgmma* instruction; float* const* registers; int count; const uint* const* a; };

inline bool same(const Wgmma& x, const Wgmma& y) {
  return x.type == y.type && x.columns == y.columns && x.a == y.a && x.b == y.b && x.accumulate == y.accumulate &&
         x.scale_a == y.scale_a && x.scale_b == y.scale_b && x.transpose_a == y.transpose_a &&
         x.transpose_b == y.transpose_b;
}

inline void issue_warp(Issue* const* lanes) {
  Thread& t = *lanes[0]->thread;
  Warpgroup& group = warpgroup_of(t);
  int warp = t.linear % GROUP / LANES;
  size_t number = group.issued[warp]++ - group.retired;
  const Wgmma& instruction = *lanes[0]->instruction;
  if (number == group.operations.size()) {
    int count = lanes[0]->count;
    group.operations.push_back({instruction, std::vector<float*>(size_t(GROUP) * count),
                                std::vector<const uint*>(GROUP * A_REGISTERS), count, 0, group.committed[warp] + 1});
  }
  WgmmaOperation& operation = group.operations[number];
  for (int l = 0; l < LANES; ++l) {
    if (!same(*lanes[l]->instruction, operation.instruction))
      fail("wgmma", text("descriptors or factors of %s differ from the other threads' of its warpgroup, at %s",
                         name(*lanes[l]->thread).c_str(), place(t.place).c_str()));
    for (int r = 0; r < operation.count; ++r)
      operation.registers[size_t(warp * LANES + l) * operation.count + r] = lanes[l]->registers[r];
    for (int r = 0; instruction.a == IN_REGISTERS && r < A_REGISTERS; ++r)
      operation.a[size_t(warp * LANES + l) * A_REGISTERS + r] = lanes[l]->a[r];
  }
  note_operands(t, instruction, group.committed[warp] + 1, warp);
  if (++operation.warps < 4) return;
  wake(group.waiting);
  if (now(EARLY)) execute_up_to(group, block_of(t), operation.group);
}

// A register is the instruction's from here to the wait that retires it. One that is none of the thread's own memory
// would be loaded in the call.
inline void lend_register(Thread& t, const void* pointer, Clock group, bool added_to) {
  size_t offset = uintptr_t(pointer) - uintptr_t(t.stack);
  Register* given = offset < STACK && t.fences ? &t.registers[offset / REGISTER] : nullptr;
  if (!given || given->written == t.fences)
    fail("missing wgmma.fence", "registers were written since the last wgmma.fence, or there was none, before the "
         "wgmma of " + name(t) + " at " + place(t.place));
  if (given->lent > t.retired && given->added_to != added_to)
    fail("register in flight", std::string("a register that wgmma still ") +
                                   (added_to ? "reads is added to" : "adds to is read") + " by another one" + at(t));
  *given = {group, added_to, given->written};
}

void issue_wgmma(const Wgmma& instruction, float* const* registers, int count, const uint* const* a) {
  Thread& t = EMU_THREAD;
  Warpgroup& group = warpgroup_of(t);
  Issue mine = {&t, &instruction, registers, count, a};
  did(t, MULTIPLY, instruction.a, instruction.b, instruction.accumulate, count);
  t.lent = group.committed[t.linear % GROUP / LANES] + 1;
  for (int r = 0; r < count; ++r) lend_register(t, registers[r], t.lent, true);
  for (int r = 0; a && r < A_REGISTERS; ++r) lend_register(t, a[r], t.lent, false);
  warp_together(t, "wgmma.mma_async", ALL, mine, issue_warp);
}

void wgmma_fence() {
  Thread& t = EMU_THREAD;
  Register*& registers = t.cluster->registers;
  if (!registers) registers = reinterpret_cast<Register*>(map_memory(register_bytes()));
  t.registers = registers + STACK / REGISTER * t.id;
  ++t.fences;
  Thread* self = &t;
  warp_together(t, "wgmma.fence", ALL, self, [](Thread** const*) {});
}

void wgmma_commit() {
  Thread& t = EMU_THREAD;
  Thread* self = &t;
  warp_together(t, "wgmma.commit_group", ALL, self, [](Thread** const* lanes) {
    Thread& any = **lanes[0];
    ++warpgroup_of(any).committed[any.linear % GROUP / LANES];
  });
}

void wgmma_wait(int left) {
  Thread& t = EMU_THREAD;
  did(t, ON_GROUP, left);
  Warpgroup& group = warpgroup_of(t);
  Thread* self = &t;
  warp_together(t, "wgmma.wait_group", ALL, self, [](Thread** const*) {});
  Clock committed = group.committed[t.linear % GROUP / LANES], last = committed > Clock(left) ? committed - left : 0;
  while (!execute_up_to(group, block_of(t), last)) {
    group.waiting.push_back(&t);
    wait_here(t, "wgmma.wait_group, for another warp's part of what it waits for");
  }
  if (group.agent) t.clocks.set(group.agent, last);
  t.retired = std::max(t.retired, last);
}

}  // namespace emu
