/* millpond's C API. Generated from torch-plugin/src by cbindgen: run `make header` after a change there.
 *
 * Functions that return int32_t give 0, or -1 and this thread's last error (millpond_last_error). Its codes: InvalidArgument
 * NotAttached AlreadyAttached DriverUnavailable OwnerUnavailable Refused OutOfMemory PeerDied OwnerDied Stale Timeout Closed
 * Protocol Forked Unsupported Internal. A char * that is returned is freed with millpond_string_free. */

#ifndef MILLPOND_H
#define MILLPOND_H

#include <stddef.h>
#include <stdint.h>

// The version of this interface. It changes when a function or a structure does.
#define MILLPOND_ABI_VERSION 2

// What an entry returns for an error.
#define MILLPOND_FAILED -1

// Set by a send: the bytes were copied into the arena first.
#define MILLPOND_COPIED 1

// Asked of a send: the receiver maps it read-only. Set by a receive: it is so.
#define MILLPOND_READ_ONLY 2

// Set by a ticket: the bytes lie in a segment of torch's caching allocator ([`segments`]), which is pinned as a whole: the caller keeps
// the tensor itself until `lent` says that nobody uses its bytes any more.
#define IN_SEGMENT 16

// The same in the result of [`millpond_send`], of one tensor or more of the message.
#define ANY_IN_SEGMENT (1 << 62)

// Asked of a receive: map nothing, wait for nothing.
#define MILLPOND_LAZY 1

// Asked of a receive or an open: block until READY is reached, or its producer has died.
#define MILLPOND_WAIT 2

// Asked of a lazy receive: open in the same call what can be had without waiting: CPU memory whose READY is reached, and GPU
// memory on the stream of `streams` that is its GPU's. What is not opened has address 0, as ever.
#define MILLPOND_EAGER 4

// Asked of a send: what these bytes stand for and are counted as, in four bits from this one on: 0 what they are, 1 to 7 a value of a
// tier (arena, copy, pool, ipc, pinned, host, inline), 15 nothing, as they only go with a value that is counted.
#define WAY_SHIFT 8

// Set by a receive: READY was reached.
#define MILLPOND_READY 8

// Asked of a ticket: it may be redeemed any number of times, until it is cancelled.
#define MILLPOND_MANY 1

typedef struct Owned Owned;

// What [`millpond_dlpack_capsule`] makes a tensor of.
typedef struct millpond_dlpack_spec {
  // Its first element.
  uint64_t address;
  // DLPack's device type: 1 CPU, 2 CUDA.
  int32_t device_type;
  // The device's ordinal.
  int32_t device_id;
  // Dimensions.
  int32_t ndim;
  // DLPack's type code.
  uint8_t code;
  // Bits of an element.
  uint8_t bits;
  // Lanes of an element; 1.
  uint16_t lanes;
  // The import or the block's address that the tensor keeps.
  uint64_t owner;
  // 0: an import, 1: a block.
  uint32_t kind;
} millpond_dlpack_spec;

// A tensor's bytes, going or coming.
typedef struct millpond_tensor {
  // Send: its first byte. Receive: where it is mapped here (0: lazily received).
  uint64_t address;
  // Bytes from the address that belong to it.
  uint64_t bytes;
  // Send: the stream that wrote it (0: the legacy default stream).
  uint64_t stream;
  // Send: forward this import (address 0: all of it). Receive: the import, to be released exactly once.
  uint64_t import_;
  // GPU ordinal; -1 for CPU memory.
  int32_t device;
  // `MILLPOND_COPIED`, `MILLPOND_READ_ONLY`.
  uint32_t flags;
} millpond_tensor;

// A message that was received.
typedef struct millpond_message {
  // The sender's JSON. Not terminated.
  const char *tree;
  // Its length.
  uintptr_t tree_bytes;
  // Its tensors.
  struct millpond_tensor *tensors;
  // How many.
  uintptr_t count;
  // The sender's slot.
  uint64_t sender;
  struct Owned *owned;
} millpond_message;

// torch's `MempoolId_t`, a pair of numbers that goes by value.
typedef struct millpond_pool_id {
  // The first number: a graph's.
  uint64_t graph;
  // The second: a user's pool.
  uint64_t user;
} millpond_pool_id;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes torch's pluggable allocator answer `cacheInfo`. 1: it does now; 0: this torch has no such slot, nothing was changed.
int32_t millpond_torch_answer_cache_info(void);

// [`ABI_VERSION`].
uint32_t millpond_abi_version(void);

// millpond's version.
const char *millpond_version(void);

// The control plane: one JSON request `{"op": ..., ...}`, one JSON answer, or null and the last error. May block up to the
// request's `timeout_ms`. Devices are GPU ordinals; -1 is the host device.
//
// | op | with | answer |
// | --- | --- | --- |
// | attach | socket, key, name, role (parent, worker), limit, on_owner_death (continue, exit), wait (stream, host), python, torch, timeout_ms | client, serial, token, owner_pid, devices: [id, ordinal, host, name, total, limit, chunk_bytes, window, window_bytes] |
// | detach, status | | {}; attached, and what attach answered |
// | serve_inline, stop_inline | driver (auto, host, cuda), limit (bytes or "80%"), chunk_bytes, handle_kind (posix_fd) | socket, key |
// | accept | timeout_ms | channel, peer: {client, serial, name, pid} |
// | connect | peer ("parent", a name, a slot), timeout_ms | the same |
// | close, channel_fd | channel | {}; fd, for poll: it stays the library's |
// | policy | channel, kill_stopped_after_ms (absent: only reported) | {}: what is done with the process at the other end if it stops; for a parent |
// | kill | channel, waited_ms (since the cancel of its call) | {}: the owner kills it, by its pidfd; for a parent |
// | ledger; read_ledger | ; socket, key | the ledger |
// | stats, reset_peak_stats, reset_accumulated_stats, snapshot | device | torch's memory_stats and growths, {}, {}, memory_snapshot |
// | begin_scope; end_scope | device; device, scope | scope; the counters of `stats` since then, allocated and freed from zero |
// | trim, get_fraction, set_fraction | device; fraction | bytes; fraction; {} |
// | at_hand | device | bytes: given back a moment ago, not free for the driver yet, this process's for the asking; room: what its limits (the arena's, its own, a fraction) leave it to reserve, null where the owner does not serve the device |
// | context_events | device (absent: every one, those not in use yet too), allowed: not where graphs are captured that the hooks do not tell of | {} |
// | counters | | messages, tensors, copies and socket bytes so far; leases, imported_bytes, foreign_frees |
// | listen | | {}: from here on growths that do not fit are told of (a parent, everybody's; else its own refusals), and deaths |
// | next_event | timeout_ms | event: {kind (pressure, refusal, death), cause (of a death, if it was killed by policy), device, by, asked, limit, reserved, free, missed}, or null |
// | locate | address | kind (block, import, foreign), window, offset, device |
// | lent | ranges: [[address, bytes]] | lent: [whether a receiver may still use a byte of it], segment: [whether it lies in one of torch's] |
// | copy_by_host | device, to, from, bytes, stream: one side is host memory; returns when it is there | pinned, pageable: bytes |
// | copy_out | as copy_by_host, from a GPU: it is queued, and a message with the block may leave | number, pieces: [end, timeline, value], pinned, pageable |
// | copied_out | number: must follow | {}: that copy is over |
// | copy_in | device, import, offset, bytes, done, to, stream, pieces | done: less than bytes where the time was up; pinned, pageable |
// | import_parted | import | parted: it was let go of and no stream can reach it |
// | pool_swap; pool_fd, pool_use; pool_import | device; ; device, peer (serial), theirs (its GPU), fd | id; fd (the caller closes it), reserved, used and their peaks; {} |
// | foreign_export | device, address: memory that is not the arena's | kind (ipc, pool), token, offset, bytes |
// | foreign_open; foreign_close | device, peer, kind, token, theirs | address, bytes; closed: it was the last |
// | dma_buf | device, address, bytes | fd (the caller closes it), offset, bytes |
// | record | events (kept), frames (of Python, at most), free_frames, folder (a file there), fresh (not the one that is on) | events, path, frames |
// | record_stop | file (one in a file too) | path |
// | recording | device, last (events) | on, events: [action, address, bytes, stream, µs since 1970, stack, pending], stacks, frames, dropped |
// | merge_traces | folder, out, blocks | processes, events, arrows, deaths, failed |
// | doctor | | checks: [name, ok, detail, fix] |
//
// # Safety
// `request` ends with a zero byte.
char *millpond_control(const char *request);

// Adds to one of this process's counters in the ledger, which every reader of it sees: `sent.TIER`, `received.TIER`,
// `fell.REASON`, `copies`, `copied_bytes`. What this library sends and receives it counts itself; this is for what goes by other
// ways. Device: a GPU's ordinal; -1 is the host, and what has no device. One addition to shared memory, no call.
//
// # Safety
// `name` ends with a zero byte.
int32_t millpond_count(int32_t device,
                       const char *name,
                       uint64_t n);

// A `DLManagedTensor` that keeps an import or a block until its deleter runs, in a Python capsule named "dltensor" (a new reference).
// From one piece of memory: the spec, and right behind it `ndim` sizes and `ndim` strides of 8 bytes. Null and the last error where
// it cannot be; null alone where Python has set an exception.
//
// # Safety
// All of that may be read (it need not be aligned), and the GIL is held.
void *millpond_dlpack_capsule(const struct millpond_dlpack_spec *spec);

// Takes the addresses of `PyCapsule_New`, `PyCapsule_IsValid` and `PyCapsule_GetPointer`, for [`millpond_dlpack_capsule`] and its
// destructor.
void millpond_dlpack_init(void *new_,
                          void *is_valid,
                          void *get_pointer);

// A capsule's destructor: deletes the tensor if nobody took it (its name is still "dltensor").
//
// # Safety
// For CPython to call on a capsule of [`millpond_dlpack_capsule`].
void millpond_dlpack_capsule_destructor(void *capsule);

// This thread's last error as JSON `{"code", "message"}`; empty if there was none. Valid until the thread's next call.
const char *millpond_last_error(void);

// Frees a text that millpond gave. Null is nothing.
//
// # Safety
// `text` came from millpond and was not freed before.
void millpond_string_free(char *text);

// A block: device is a GPU's ordinal, or -1 for the host device. 0 and the last error where there is none.
uint64_t millpond_allocate(int32_t device,
                           uint64_t bytes,
                           uint64_t on);

// Frees a block of [`millpond_allocate`].
int32_t millpond_deallocate(uint64_t address);

// Sends one message with all its tensors. Every hold is made before the frame leaves. Returns which of the first 62 tensors were copied
// into the arena first, a bit each, and in bit 62 whether any lies in a segment of torch's caching allocator (`MILLPOND_IN_SEGMENT`); `copied`, if
// it is not null, gets a byte each, 1 for what was copied. -1 and the last error where nothing was sent.
//
// # Safety
// `tree` has `tree_bytes` bytes, `tensors` has `count` entries (it need not be aligned), `copied` is null or has room for `count` bytes.
int64_t millpond_send(uint64_t number,
                      const char *tree,
                      uintptr_t tree_bytes,
                      const struct millpond_tensor *tensors,
                      uintptr_t count,
                      int64_t timeout_ms,
                      uint8_t *copied);

// Receives one message. `streams[i]`: the stream of GPU ordinal i that later work will use (missing: the legacy default);
// it is made to wait for READY. CPU values are waited for here. A message that fits goes to `buffer`: the number of its tensors and the
// sender's slot (8 bytes each), the tensors, the tree; its length is returned. Of one that does not, `out` is set and 0 returned. -1
// and the last error where there is none.
//
// # Safety
// `streams` is null or has `stream_count` entries (it need not be aligned), `buffer` is null or has room for `capacity` bytes, `out` may be written.
int64_t millpond_receive(uint64_t number,
                         int64_t timeout_ms,
                         uint32_t flags,
                         const uint64_t *streams,
                         uintptr_t stream_count,
                         uint8_t *buffer,
                         uintptr_t capacity,
                         struct millpond_message **out);

// Frees a message's buffers, not its imports. Null is nothing.
//
// # Safety
// `message` came from [`millpond_receive`] and was not freed before.
void millpond_message_free(struct millpond_message *message);

// Maps an import and makes the stream wait for READY; may be called often. With `MILLPOND_WAIT`, and for CPU memory, this
// thread waits instead.
//
// # Safety
// `out` may be written.
int32_t millpond_import_open(uint64_t import,
                             uint64_t on,
                             uint32_t flags,
                             struct millpond_tensor *out);

// Blocks until READY is reached, its producer has died, or the time is up (negative: for ever).
int32_t millpond_import_ready(uint64_t import, int64_t timeout_ms);

// Makes a received value this process's own: it outlives its maker, under this process's account. The import, or with 0 the
// value that is mapped at an address. Waits for READY (negative: for ever).
int32_t millpond_adopt(uint64_t import,
                       uint64_t address,
                       int64_t timeout_ms);

// Notes that a stream uses the block or import at an address: its reuse, or its DONE, follows that stream too.
int32_t millpond_import_record_stream(uint64_t address,
                                      uint64_t on);

// Lets go of an import. Never blocks, from any thread, without the GIL; in a forked child, nothing happens.
int32_t millpond_import_release(uint64_t import);

// Waits until every receiver of the block at an address is done with it: the stream, once all have let go on their side;
// this thread until then, and altogether with `MILLPOND_WAIT` or for CPU memory.
int32_t millpond_wait_done(uint64_t address,
                           uint64_t on,
                           uint32_t flags,
                           int64_t timeout_ms);

// Whether torch's out-of-memory exception can be thrown in this process: its symbols are there.
int32_t millpond_torch_can_throw(void);

// A message for whoever redeems it, as text: null and the last error where it cannot be. Sets `MILLPOND_COPIED` and
// `MILLPOND_IN_SEGMENT` in place.
//
// # Safety
// `tree` has `tree_bytes` bytes, `tensors` has `count` entries.
char *millpond_ticket(const char *tree,
                      uintptr_t tree_bytes,
                      struct millpond_tensor *tensors,
                      uintptr_t count,
                      uint32_t flags);

// Takes a ticket up, lazily: a message like those of `millpond_receive`.
//
// # Safety
// `ticket` has `bytes` bytes, `out` may be written.
int32_t millpond_redeem(const char *ticket, uintptr_t bytes, struct millpond_message **out);

// Ends what is left of a ticket of this process.
//
// # Safety
// `ticket` has `bytes` bytes.
int32_t millpond_ticket_cancel(const char *ticket, uintptr_t bytes);

// torch's malloc under full replacement. Throws `torch.OutOfMemoryError` (C++), since torch takes a null pointer for a good
// one; `RuntimeError` for anything else. Zero bytes: null.
void *millpond_malloc(uintptr_t size,
                      int device,
                      void *stream);

// torch's malloc under a `MemPool`: null where there is no memory, so that torch frees its cache and tries again.
void *millpond_pool_malloc(uintptr_t size,
                           int device,
                           void *stream);

// torch's free. Never unwinds, never fails: an address that is no live block is counted and left alone. In a forked child,
// and after detach, nothing happens.
void millpond_free(void *pointer,
                   uintptr_t _size,
                   int device,
                   void *_stream);

// torch's lazy initialisation of CUDA. Nothing to do: heaps open at first use.
void millpond_torch_init(int _device_count);

// `torch.cuda.empty_cache()`: gives whole free chunks of every device back.
void millpond_torch_reset(void);

// `torch.cuda.set_per_process_memory_fraction(fraction, device)`.
void millpond_torch_memory_fraction(double fraction, int device);

// The block that holds an address, and its size.
//
// # Safety
// `size` is null or may be written.
void *millpond_torch_base_alloc(void *pointer, uintptr_t *size);

// `tensor.record_stream(stream)`, autograd, DDP. The address may be null or foreign.
void millpond_torch_record_stream(void *pointer, void *stream);

// A graph's capture begins. The third argument is a `std::function` that tells the capture's streams; it dies with the
// call and is not needed: malloc asks the driver whether its stream captures.
void millpond_torch_begin_allocate_to_pool(int device,
                                           struct millpond_pool_id pool,
                                           const void *_filter);

// [`millpond_torch_begin_allocate_to_pool`] as torch 2.1 and 2.2 have it: they name the stream, and the pool at the beginning only.
void millpond_torch_begin_allocate_stream_to_pool(int device,
                                                  void *stream,
                                                  struct millpond_pool_id pool);

// [`millpond_torch_end_allocate_to_pool`] as torch 2.1 and 2.2 have it.
void millpond_torch_end_allocate_stream_to_pool(int device, void *stream);

// The capture has ended.
void millpond_torch_end_allocate_to_pool(int device, struct millpond_pool_id pool);

// The graph is gone.
void millpond_torch_release_pool(int device, struct millpond_pool_id pool);

// The capture that the calling thread began has failed. Not a hook of torch's, which (2.3 to 2.12) says nothing then: whoever sees
// `CUDAGraph.capture_end` raise calls this, on that thread. Nothing happens where torch has said that the capture has ended.
void millpond_torch_capture_failed(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MILLPOND_H */
