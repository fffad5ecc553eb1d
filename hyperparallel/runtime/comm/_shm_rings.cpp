// Rings, doorbells and the step that moves all that can be moved without waiting. Part of _shm.cpp,
// which tells the model.

#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "_shm_reduce.cpp"

namespace {

constexpr size_t kLine = 64;
constexpr u32 kAnyone = UINT32_MAX;
constexpr long kNap = 20 * 1000 * 1000;  // ns between looks at peers and deadline
constexpr long kShortNap = 1000 * 1000;  // ns, while other groups have unfinished transfers

inline size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// A cache line each: two writers on one line would take it from each other at every count.
struct alignas(kLine) Word {
  std::atomic<u64> value;
};

struct alignas(kLine) Door {  // one per member
  std::atomic<u32> bell;      // changes with every ring; the futex
  std::atomic<u32> sleeper;   // 0 awake, kAnyone, or 1 + the member it sleeps for
  std::atomic<u32> wants_space;
};

struct Note {  // about the message that a slot belongs to
  u64 tag, bytes;
};

struct Ring {
  Word* head;
  Word* tails;  // one per reader
  Note* notes;
  u8* data;
  u32 slots;
  size_t chunk;
  int readers;
  u64 written = 0, read = 0;  // this process as writer, as reader
  u64 lowest = 0;             // smallest tail seen
  u64 stamp = 0;              // round in which an earlier operation was stuck here
};

// Bytes laid out in rows: `row` bytes, the next row `stride` bytes further.
struct Rows {
  u8* base;
  size_t row, stride;
};

struct Stream {
  Ring* ring;
  int peer;
  Rows rows;
  size_t total, done;
};

enum Kind : u32 { kAllReduce = 1, kAllGather, kReduceScatter, kAllToAll, kPermute };
struct Comm;

struct Op {
  Comm* comm;
  u64 tag;
  std::vector<Stream> outs, ins;
  bool reduces, done;
  bool over;  // an all-reduce whose result replaces its operand
  u32 type, how;
  const u8* own;  // this member's part of a reduction, dense
  u8* into;
  int waiting_for;        // a member, or -1
  int stranger;           // member whose message did not fit, or -1
  Note strange;
};

struct Comm {
  int n, me;
  Door* doors;
  std::vector<Ring> shared;   // by writer
  std::vector<Ring> between;  // writer * n + reader
  std::vector<int> pidfds;
  std::deque<Op*> open;
  std::vector<Op*> spare;
  u64 round = 0;
  int busy = 0;          // operations left unfinished by the last look
  bool starved = false;  // one of them needs a slot that a reader still holds
};

std::mutex mutex;
std::vector<Comm*> comms;

int futex(std::atomic<u32>* word, int what, u32 value, const timespec* limit) {
  return static_cast<int>(syscall(SYS_futex, word, what, value, limit, nullptr, 0));
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void knock(Comm* comm, int peer) {
  Door& door = comm->doors[peer];
  door.bell.fetch_add(1);
  u32 sleeper = door.sleeper.load();
  // `bell` first, then `sleeper`, and the sleeper the other way round, all in one order of the
  // processor's (seq_cst): one of the two sees the other. A wake-up costs a system call.
  if (sleeper == kAnyone || sleeper == static_cast<u32>(comm->me) + 1) {
    futex(&door.bell, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

// Copies `bytes` from position `from` of one layout to position `to` of another.
void move(const Rows& target, size_t to, const Rows& source, size_t from, size_t bytes) {
  while (bytes) {
    size_t a = to % target.row, b = from % source.row;
    size_t piece = std::min(bytes, std::min(target.row - a, source.row - b));
    std::memcpy(target.base + to / target.row * target.stride + a,
                source.base + from / source.row * source.stride + b, piece);
    to += piece, from += piece, bytes -= piece;
  }
}

bool has_space(Ring& ring) {
  if (ring.written - ring.lowest < ring.slots) return true;
  // Tails only grow, so what was seen last is a safe bound: all are read only where it says full.
  ring.lowest = UINT64_MAX;
  for (int r = 0; r < ring.readers; r++) {
    ring.lowest = std::min<u64>(ring.lowest, ring.tails[r].value.load(std::memory_order_seq_cst));
  }
  return ring.written - ring.lowest < ring.slots;
}

// Acquire, to the release in `post`: what is counted is there, its note too.
bool has_chunk(Ring& ring) { return ring.head->value.load(std::memory_order_acquire) > ring.read; }

void post(Op* op, Stream& s, int reader) {
  Ring& ring = *s.ring;
  Comm* comm = op->comm;
  while (s.done < s.total) {
    if (!has_space(ring)) {
      // Asked again behind the flag: a reader that freed a slot just before did not see it.
      comm->doors[comm->me].wants_space.store(1);
      if (!has_space(ring)) {
        comm->starved = true;
        return;
      }
    }
    size_t slot = ring.written % ring.slots, bytes = std::min(ring.chunk, s.total - s.done);
    Rows target{ring.data + slot * ring.chunk, bytes, bytes};
    move(target, 0, s.rows, s.done, bytes);
    ring.notes[slot] = {op->tag, s.total};
    s.done += bytes;
    // Last, by release: a reader that sees the count sees the bytes and the note.
    ring.head->value.store(++ring.written, std::memory_order_release);
    if (reader >= 0) {
      knock(comm, reader);
    } else {
      for (int p = 0; p < comm->n; p++) if (p != comm->me) knock(comm, p);
    }
  }
}

// The bytes of the next chunk of a stream that has one; null if it belongs to another operation.
const u8* peek(Op* op, Stream& s) {
  Ring& ring = *s.ring;
  size_t slot = ring.read % ring.slots;
  const Note& note = ring.notes[slot];
  if (note.tag != op->tag || note.bytes != s.total) {
    op->stranger = s.peer;
    op->strange = note;
    return nullptr;
  }
  return ring.data + slot * ring.chunk;
}

void release(Comm* comm, Stream& s) {
  Ring& ring = *s.ring;
  // In one order with the flag that is read next (seq_cst), or the writer's second look in `post`
  // could miss the slot while this rank misses the flag.
  ring.tails[ring.readers == 1 ? 0 : comm->me].value.store(++ring.read, std::memory_order_seq_cst);
  if (comm->doors[s.peer].wants_space.load()) knock(comm, s.peer);
}

void receive(Op* op) {
  for (Stream& s : op->ins) {
    while (s.done < s.total && s.ring->stamp != op->comm->round) {
      if (!has_chunk(*s.ring)) {
        if (op->waiting_for < 0) op->waiting_for = s.peer;
        break;
      }
      size_t bytes = std::min(s.ring->chunk, s.total - s.done);
      const u8* data = peek(op, s);
      if (!data) return;
      move(s.rows, s.done, Rows{const_cast<u8*>(data), bytes, bytes}, 0, bytes);
      s.done += bytes;
      release(op->comm, s);
    }
  }
}

void receive_and_reduce(Op* op) {
  const u8* parts[256];
  Comm* comm = op->comm;
  while (op->ins[0].done < op->ins[0].total) {
    for (Stream& s : op->ins) {
      // All members' chunks or none: they are added in member order, early ones wait in their slots.
      if (s.ring->stamp == comm->round) return;
      if (!has_chunk(*s.ring)) {
        if (op->waiting_for < 0) op->waiting_for = s.peer;
        return;
      }
    }
    size_t at = op->ins[0].done;
    size_t bytes = std::min(op->ins[0].ring->chunk, op->ins[0].total - at);
    // Where the result replaces the operand, others must have been sent what is overwritten.
    if (op->over && op->outs[0].done < at + bytes) return;
    parts[comm->me] = op->own + at;
    for (Stream& s : op->ins) if (!(parts[s.peer] = peek(op, s))) return;
    reduce(op->type, op->how, op->into + at, parts, comm->n, bytes);
    for (Stream& s : op->ins) {
      s.done += bytes;
      release(comm, s);
    }
  }
}

bool unfinished(const std::vector<Stream>& streams) {
  for (const Stream& s : streams) if (s.done < s.total) return true;
  return false;
}

// Moves all that can be moved, oldest operation first; a ring belongs to the oldest that needs it.
void progress(Comm* comm) {
  comm->round++;
  comm->busy = 0;
  if (comm->starved) {
    comm->starved = false;
    comm->doors[comm->me].wants_space.store(0);
  }
  for (Op* op : comm->open) {
    // Nobody can tell where the next message begins behind one that does not fit.
    if (op->stranger >= 0) break;
    op->waiting_for = -1;
    for (Stream& s : op->outs) if (s.ring->stamp != comm->round) post(op, s, s.peer);
    if (op->reduces && !op->ins.empty()) receive_and_reduce(op);
    else receive(op);
    op->done = !unfinished(op->outs) && !unfinished(op->ins);
    if (!op->done) {
      comm->busy++;
      // Later operations must not overtake on this ring: its reader takes messages in order.
      for (Stream& s : op->outs) if (s.done < s.total) s.ring->stamp = comm->round;
      for (Stream& s : op->ins) if (s.done < s.total) s.ring->stamp = comm->round;
    }
  }
}

}  // namespace
