// Collectives between ranks of one machine through one shared mapping per group.
//
// Model. Member i owns a ring that all others read (gather, all-reduce) and one ring towards each other
// member (exchange, reduce-scatter, permute). A ring is `slots` slots of `chunk` bytes; a message takes one
// or more slots in order. `head` counts slots written, `tail[j]` slots that reader j is done with, so each
// word has one writer and nothing is locked. A start writes as many chunks as fit and never blocks; what is
// left is moved whenever this process is inside any call. So no order of waits can deadlock.
//
// Waiting. A member spins briefly, then sleeps on its own doorbell (futex). Whoever writes a chunk it reads,
// or frees a slot it needs, rings it, and enters the kernel only if it sleeps for that member. Sleeps are
// short enough to notice a dead peer (its pidfd is polled) and the deadline.
//
// Reductions go in member order, 16-bit floats in float32, so every member gets the same bits. Each message
// carries its kind, type and length; a reader that expects something else reports it instead of reading on.

#include <atomic>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <deque>
#include <mutex>
#include <vector>

#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr size_t kLine = 64;
constexpr u32 kAnyone = UINT32_MAX;
constexpr long kNap = 20 * 1000 * 1000;  // ns between looks at peers and deadline
constexpr long kShortNap = 1000 * 1000;  // ns, while other groups have unfinished transfers

inline size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

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
enum Type : u32 { kF32, kF64, kBF16, kI64, kI32, kI16, kI8, kU8 };
enum Reduce : u32 { kSum, kMax, kMin, kProd, kAvg };

struct Comm;

struct Op {
  Comm* comm;
  u64 tag;
  std::vector<Stream> outs, ins;
  bool reduces, done;
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

inline float widen(uint16_t bits) {
  u32 word = static_cast<u32>(bits) << 16;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

inline uint16_t narrow(float value) {  // round to nearest even; NaN stays NaN
  u32 word;
  std::memcpy(&word, &value, 4);
  u32 rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

template <typename T>
inline T combine(T a, T b, u32 how) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    switch (how) {
      case kMax: return a > b ? a : b;
      case kMin: return a < b ? a : b;
      case kProd: return static_cast<T>(static_cast<u64>(static_cast<U>(a)) * static_cast<U>(b));
      default: return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    }
  } else {
    switch (how) {
      case kMax: return (a > b || a != a) ? a : b;  // NaN wins, as in torch
      case kMin: return (a < b || a != a) ? a : b;
      case kProd: return a * b;
      default: return a + b;
    }
  }
}

constexpr size_t kBlock = 2048;  // elements: a block of sums stays in the first-level cache

template <typename T, u32 how>
void reduce_dense(T* into, const u8* const* parts, int n, size_t count) {
  auto* first = reinterpret_cast<const T*>(parts[0]);
  auto* second = reinterpret_cast<const T*>(parts[1]);
  if (n == 2) {
    for (size_t i = 0; i < count; i++) into[i] = combine<T>(first[i], second[i], how);
    return;
  }
  T sums[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    size_t size = std::min(kBlock, count - at);
    for (size_t i = 0; i < size; i++) sums[i] = combine<T>(first[at + i], second[at + i], how);
    for (int p = 2; p < n; p++) {
      auto* next = reinterpret_cast<const T*>(parts[p]) + at;
      for (size_t i = 0; i < size; i++) sums[i] = combine<T>(sums[i], next[i], how);
    }
    std::memcpy(into + at, sums, size * sizeof(T));
  }
}

template <u32 how>
void reduce_bf16(uint16_t* into, const u8* const* parts, int n, size_t count, float scale) {
  float sums[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    size_t size = std::min(kBlock, count - at);
    auto* first = reinterpret_cast<const uint16_t*>(parts[0]) + at;
    for (size_t i = 0; i < size; i++) sums[i] = widen(first[i]);
    for (int p = 1; p < n; p++) {
      auto* next = reinterpret_cast<const uint16_t*>(parts[p]) + at;
      for (size_t i = 0; i < size; i++) sums[i] = combine<float>(sums[i], widen(next[i]), how);
    }
    for (size_t i = 0; i < size; i++) into[at + i] = narrow(sums[i] / scale);
  }
}

template <u32 how>
void reduce_as(u32 type, u8* into, const u8* const* parts, int n, size_t bytes, float scale) {
  switch (type) {
    case kF32: return reduce_dense<float, how>((float*)into, parts, n, bytes / 4);
    case kF64: return reduce_dense<double, how>((double*)into, parts, n, bytes / 8);
    case kBF16: return reduce_bf16<how>((uint16_t*)into, parts, n, bytes / 2, scale);
    case kI64: return reduce_dense<int64_t, how>((int64_t*)into, parts, n, bytes / 8);
    case kI32: return reduce_dense<int32_t, how>((int32_t*)into, parts, n, bytes / 4);
    case kI16: return reduce_dense<int16_t, how>((int16_t*)into, parts, n, bytes / 2);
    case kI8: return reduce_dense<int8_t, how>((int8_t*)into, parts, n, bytes);
    case kU8: return reduce_dense<u8, how>(into, parts, n, bytes);
  }
}

void reduce(u32 type, u32 how, u8* into, const u8* const* parts, int n, size_t bytes) {
  switch (how) {
    case kMax: return reduce_as<kMax>(type, into, parts, n, bytes, 1);
    case kMin: return reduce_as<kMin>(type, into, parts, n, bytes, 1);
    case kProd: return reduce_as<kProd>(type, into, parts, n, bytes, 1);
    default: break;
  }
  reduce_as<kSum>(type, into, parts, n, bytes, how == kAvg ? static_cast<float>(n) : 1.0f);
  if (how != kAvg) return;
  if (type == kF32) for (size_t i = 0; i < bytes / 4; i++) ((float*)into)[i] /= n;
  if (type == kF64) for (size_t i = 0; i < bytes / 8; i++) ((double*)into)[i] /= n;
}

bool has_space(Ring& ring) {
  if (ring.written - ring.lowest < ring.slots) return true;
  ring.lowest = UINT64_MAX;
  for (int r = 0; r < ring.readers; r++) {
    ring.lowest = std::min<u64>(ring.lowest, ring.tails[r].value.load(std::memory_order_seq_cst));
  }
  return ring.written - ring.lowest < ring.slots;
}

bool has_chunk(Ring& ring) { return ring.head->value.load(std::memory_order_acquire) > ring.read; }

void post(Op* op, Stream& s, int reader) {
  Ring& ring = *s.ring;
  Comm* comm = op->comm;
  while (s.done < s.total) {
    if (!has_space(ring)) {
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
      if (s.ring->stamp == comm->round) return;
      if (!has_chunk(*s.ring)) {
        if (op->waiting_for < 0) op->waiting_for = s.peer;
        return;
      }
    }
    size_t at = op->ins[0].done;
    size_t bytes = std::min(op->ins[0].ring->chunk, op->ins[0].total - at);
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

// Moves everything that can be moved, oldest operation first; a ring belongs to the oldest that needs it.
void progress(Comm* comm) {
  comm->round++;
  comm->busy = 0;
  if (comm->starved) {
    comm->starved = false;
    comm->doors[comm->me].wants_space.store(0);
  }
  for (Op* op : comm->open) {
    if (op->stranger >= 0) break;
    op->waiting_for = -1;
    for (Stream& s : op->outs) if (s.ring->stamp != comm->round) post(op, s, s.peer);
    if (op->reduces && !op->ins.empty()) receive_and_reduce(op);
    else receive(op);
    op->done = !unfinished(op->outs) && !unfinished(op->ins);
    if (!op->done) {
      comm->busy++;
      for (Stream& s : op->outs) if (s.done < s.total) s.ring->stamp = comm->round;
      for (Stream& s : op->ins) if (s.done < s.total) s.ring->stamp = comm->round;
    }
  }
}

long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

int dead_peer(Comm* comm) {
  for (int p = 0; p < comm->n; p++) {
    pollfd entry{comm->pidfds[p], POLLIN, 0};
    if (entry.fd >= 0 && poll(&entry, 1, 0) > 0) return p;
  }
  return -1;
}

void forget(Op* op) {
  auto& open = op->comm->open;
  for (auto it = open.begin(); it != open.end(); ++it) {
    if (*it == op) {
      open.erase(it);
      break;
    }
  }
  op->comm->spare.push_back(op);
}

Op* fresh(Comm* comm, u32 kind, u32 type, u32 how) {
  Op* op;
  if (comm->spare.empty()) {
    op = new Op();
  } else {
    op = comm->spare.back();
    comm->spare.pop_back();
    op->outs.clear();
    op->ins.clear();
  }
  op->comm = comm;
  op->tag = kind | (type << 8) | (how << 16);
  op->reduces = kind == kAllReduce || kind == kReduceScatter;
  op->done = false;
  op->type = type, op->how = how;
  op->waiting_for = op->stranger = -1;
  return op;
}

void add(std::vector<Stream>& streams, Ring* ring, int peer, Rows rows, size_t total) {
  if (total) streams.push_back(Stream{ring, peer, rows, total, 0});
}

// Returns null when the operation is complete already.
Op* begin(Op* op) {
  op->comm->open.push_back(op);
  progress(op->comm);
  if (!op->done) return op;
  forget(op);
  return nullptr;
}

struct Cuts {  // pieces of one dim of a dense tensor
  size_t outer, inner, total = 0;
  Cuts(const int64_t* sizes, int n, size_t outer, size_t inner) : outer(outer), inner(inner) {
    for (int i = 0; i < n; i++) total += sizes[i];
  }
  Rows rows(u8* base, const int64_t* sizes, int i) const {
    size_t before = 0;
    for (int j = 0; j < i; j++) before += sizes[j];
    return {base + before * inner, std::max<size_t>(1, sizes[i] * inner), total * inner};
  }
  size_t bytes(const int64_t* sizes, int i) const { return outer * sizes[i] * inner; }
};

}  // namespace

extern "C" {

// Bytes of the mapping for a group of n members.
size_t hp_size(int n, u32 slots, size_t chunk, u32 pair_slots, size_t pair_chunk) {
  auto ring = [](int readers, u32 s, size_t c) {
    return sizeof(Word) * (1 + readers) + lines(sizeof(Note) * s) + lines(c) * s;
  };
  return sizeof(Door) * n + n * ring(n, slots, chunk) + n * n * ring(1, pair_slots, pair_chunk);
}

Comm* hp_open(int fd, int n, int me, u32 slots, size_t chunk, u32 pair_slots, size_t pair_chunk,
              const int64_t* pids) {
  size_t size = hp_size(n, slots, chunk, pair_slots, pair_chunk);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  u8* at = static_cast<u8*>(memory);
  auto take = [&at](size_t bytes) { u8* here = at; at += bytes; return here; };
  auto ring = [&](int readers, u32 s, size_t c) {
    Ring r{};
    r.head = reinterpret_cast<Word*>(take(sizeof(Word)));
    r.tails = reinterpret_cast<Word*>(take(sizeof(Word) * readers));
    r.notes = reinterpret_cast<Note*>(take(lines(sizeof(Note) * s)));
    r.data = take(lines(c) * s);
    r.slots = s, r.chunk = c, r.readers = readers;
    return r;
  };
  auto* comm = new Comm();
  comm->n = n, comm->me = me;
  comm->doors = reinterpret_cast<Door*>(take(sizeof(Door) * n));
  for (int i = 0; i < n; i++) {
    comm->shared.push_back(ring(n, slots, chunk));
    // The writer's own tail must not hold it back.
    if (i == me) comm->shared[i].tails[i].value.store(UINT64_MAX);
  }
  for (int i = 0; i < n * n; i++) comm->between.push_back(ring(1, pair_slots, pair_chunk));
  for (int i = 0; i < n; i++) {
    comm->pidfds.push_back(i == me ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pids[i], 0)));
  }
  std::lock_guard<std::mutex> guard(mutex);
  comms.push_back(comm);
  return comm;
}

Op* hp_all_reduce(Comm* comm, u8* source, u8* into, size_t bytes, u32 type, u32 how) {
  std::lock_guard<std::mutex> guard(mutex);
  Op* op = fresh(comm, kAllReduce, type, how);
  op->own = source, op->into = into;
  add(op->outs, &comm->shared[comm->me], -1, Rows{source, bytes, bytes}, bytes);
  for (int p = 0; p < comm->n; p++) {
    if (p != comm->me) add(op->ins, &comm->shared[p], p, Rows{}, bytes);
  }
  return begin(op);
}

Op* hp_all_gather(Comm* comm, u8* source, u8* into, const int64_t* sizes, size_t outer,
                  size_t inner, u32 type) {
  std::lock_guard<std::mutex> guard(mutex);
  Op* op = fresh(comm, kAllGather, type, 0);
  Cuts cuts(sizes, comm->n, outer, inner);
  size_t own = cuts.bytes(sizes, comm->me);
  Rows dense{source, std::max<size_t>(1, own), own};
  add(op->outs, &comm->shared[comm->me], -1, dense, own);
  for (int p = 0; p < comm->n; p++) {
    if (p != comm->me) {
      add(op->ins, &comm->shared[p], p, cuts.rows(into, sizes, p), cuts.bytes(sizes, p));
    }
  }
  Op* left = begin(op);
  move(cuts.rows(into, sizes, comm->me), 0, dense, 0, own);
  return left;
}

Op* hp_reduce_scatter(Comm* comm, u8* source, u8* into, const int64_t* sizes, size_t outer,
                      size_t inner, u32 type, u32 how) {
  std::lock_guard<std::mutex> guard(mutex);
  Op* op = fresh(comm, kReduceScatter, type, how);
  Cuts cuts(sizes, comm->n, outer, inner);
  size_t own = cuts.bytes(sizes, comm->me);
  Rows mine = cuts.rows(source, sizes, comm->me);
  for (int step = 1; step < comm->n; step++) {
    int p = (comm->me + step) % comm->n;  // everyone starts with another reader
    add(op->outs, &comm->between[comm->me * comm->n + p], p, cuts.rows(source, sizes, p),
        cuts.bytes(sizes, p));
  }
  for (int p = 0; p < comm->n; p++) {
    if (p != comm->me) add(op->ins, &comm->between[p * comm->n + comm->me], p, Rows{}, own);
  }
  op->into = into, op->own = into;
  if (outer == 1) op->own = mine.base;
  else move(Rows{into, std::max<size_t>(1, own), own}, 0, mine, 0, own);
  return begin(op);
}

Op* hp_all_to_all(Comm* comm, u8* source, u8* into, const int64_t* splits, size_t split_outer,
                  size_t split_inner, const int64_t* joins, size_t join_outer, size_t join_inner,
                  u32 type) {
  std::lock_guard<std::mutex> guard(mutex);
  Op* op = fresh(comm, kAllToAll, type, 0);
  Cuts out(splits, comm->n, split_outer, split_inner), in(joins, comm->n, join_outer, join_inner);
  for (int step = 1; step < comm->n; step++) {
    int p = (comm->me + step) % comm->n;
    add(op->outs, &comm->between[comm->me * comm->n + p], p, out.rows(source, splits, p),
        out.bytes(splits, p));
    add(op->ins, &comm->between[p * comm->n + comm->me], p, in.rows(into, joins, p),
        in.bytes(joins, p));
  }
  Op* left = begin(op);
  move(in.rows(into, joins, comm->me), 0, out.rows(source, splits, comm->me), 0,
       out.bytes(splits, comm->me));
  return left;
}

// targets: members to send to. from: the member to receive from, or -1.
Op* hp_permute(Comm* comm, u8* source, size_t bytes, u8* into, size_t in_bytes,
               const int64_t* targets, int num_targets, int from, u32 type) {
  std::lock_guard<std::mutex> guard(mutex);
  Op* op = fresh(comm, kPermute, type, 0);
  for (int i = 0; i < num_targets; i++) {
    int p = static_cast<int>(targets[i]);
    add(op->outs, &comm->between[comm->me * comm->n + p], p, Rows{source, bytes, bytes}, bytes);
  }
  if (from >= 0) {
    Rows rows{into, in_bytes, in_bytes};
    add(op->ins, &comm->between[from * comm->n + comm->me], from, rows, in_bytes);
  }
  return begin(op);
}

// 0 done; else what + (member << 8): 1 deadline passed, 2 member died, 3 a signal came: call again,
// 4 member sent something else, told in `strange`. Only 0 and 3 leave the group usable.
int hp_wait(Op* op, long timeout_ns, long spins, u64* strange) {
  Comm* comm = op->comm;
  Door& door = comm->doors[comm->me];
  long deadline = 0;
  int lost = -1;
  bool late = false;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    u32 bell = door.bell.load();
    bool others = false;
    for (Comm* each : comms) {
      if (each != comm && !each->open.empty()) {
        progress(each);
        others = others || each->busy;
      }
    }
    progress(comm);
    if (op->done) {
      forget(op);
      return 0;
    }
    if (op->stranger >= 0) {
      strange[0] = op->strange.tag, strange[1] = op->strange.bytes;
      return 4 | (op->stranger << 8);
    }
    if (lost >= 0) return 2 | (lost << 8);
    if (late) return 1 | (std::max(0, op->waiting_for) << 8);
    bool any = others || comm->busy > 1 || comm->starved || op->waiting_for < 0;
    u32 wanted = any ? kAnyone : op->waiting_for + 1;
    lock.unlock();
    long spin = 0;
    while (spin < spins && door.bell.load(std::memory_order_relaxed) == bell) relax(), spin++;
    if (spin >= spins) {
      long now = now_ns();
      if (!deadline) deadline = now + timeout_ns;
      long nap = std::min(others ? kShortNap : kNap, std::max(1L, deadline - now));
      door.sleeper.store(wanted);
      timespec limit{nap / 1000000000L, nap % 1000000000L};
      int failed = futex(&door.bell, FUTEX_WAIT, bell, &limit) ? errno : 0;
      door.sleeper.store(0);
      if (failed == EINTR) return 3;
      if (failed == ETIMEDOUT) {
        // Judged after one more look: a peer may have left when it had sent all we need.
        lost = dead_peer(comm);
        late = now_ns() >= deadline;
      }
    }
    lock.lock();
  }
}

}  // extern "C"
