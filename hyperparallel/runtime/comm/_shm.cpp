// Collectives between ranks of one machine through one shared mapping per group.
//
// Model. Member i owns a ring that all others read (gather, all-reduce) and one ring towards each
// other member (exchange, reduce-scatter, permute). A ring is `slots` slots of `chunk` bytes; a
// message takes one or more slots in order. `head` counts slots written, `tail[j]` slots that
// reader j is done with, so each word has one writer and nothing is locked. A start writes as many
// chunks as fit and never blocks; what is left is moved whenever this process is inside any call.
// So no order of waits can deadlock.
//
// Waiting. A member spins briefly, then sleeps on its own doorbell (futex). Whoever writes a chunk
// it reads, or frees a slot it needs, rings it, and enters the kernel only if it sleeps for that
// member. Sleeps are short enough to notice a dead peer (its pidfd is polled) and the deadline.
//
// Reductions go in member order, 16-bit floats in float32, so every member gets the same bits. Each
// message carries its kind, type and length; a reader that expects something else reports it
// instead of reading on.

#include <ctime>

#include <poll.h>
#include <sys/mman.h>

#include "_shm_rings.cpp"

namespace {

long now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

int dead_peer(Comm* comm) {
  for (int p = 0; p < comm->n; p++) {
    // Readable once the process has ended; its number alone may be another process's by then.
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
  // Kept with the memory of its lists: a small collective allocates nothing.
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
  // Compared by readers. `how` belongs to it: a sum would meet a maximum of one length unseen.
  op->tag = kind | (type << 8) | (how << 16);
  op->reduces = kind == kAllReduce || kind == kReduceScatter;
  op->done = op->over = false;
  op->type = type, op->how = how;
  op->waiting_for = op->stranger = -1;
  return op;
}

void add(std::vector<Stream>& streams, Ring* ring, int peer, Rows rows, size_t total) {
  // Of no bytes there is no chunk: a reader would wait for one that nobody sends.
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
    // At least 1 for an empty piece too: `move` divides by it.
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
  // A new memfd is all zeros, the first value of every counter: no member has to come first.
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
    // -1 on kernels without (before 5.3): then only the deadline tells of a death.
    comm->pidfds.push_back(i == me ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pids[i], 0)));
  }
  std::lock_guard<std::mutex> guard(mutex);
  comms.push_back(comm);
  return comm;
}

Op* hp_all_reduce(Comm* comm, u8* source, u8* into, size_t bytes, u32 type, u32 how) {
  std::lock_guard<std::mutex> guard(mutex);
  Op* op = fresh(comm, kAllReduce, type, how);
  // The caller's memory, which Python holds until the wait is over (`_under_way` in shm.py).
  op->own = source, op->into = into, op->over = source == into;
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
  // After the start, so that the others read while this rank copies its own piece.
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
  // Reductions read dense parts. A strided one goes where its sum will be: each element is read
  // before it is written.
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
    // Before the look at the rings: whatever comes later changes it, and then no sleep begins.
    u32 bell = door.bell.load();
    bool others = false;
    for (Comm* each : comms) {
      // A peer may be in another group's wait, and come to this one when that is served.
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
    // One member's chunk ends the sleep only where nothing else can: no slot, no other operation.
    bool any = others || comm->busy > 1 || comm->starved || op->waiting_for < 0;
    u32 wanted = any ? kAnyone : op->waiting_for + 1;
    lock.unlock();
    long spin = 0;
    while (spin < spins && door.bell.load(std::memory_order_relaxed) == bell) relax(), spin++;
    if (spin >= spins) {
      long now = now_ns();
      // The clock is read before a sleep only: most waits are over while they spin.
      if (!deadline) deadline = now + timeout_ns;
      long nap = std::min(others ? kShortNap : kNap, std::max(1L, deadline - now));
      // Told before the kernel compares `bell`: who rings in between has changed it or sees this.
      door.sleeper.store(wanted);
      timespec limit{nap / 1000000000L, nap % 1000000000L};
      int failed = futex(&door.bell, FUTEX_WAIT, bell, &limit) ? errno : 0;
      door.sleeper.store(0);
      // Python runs a signal's handler outside of this call only.
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
