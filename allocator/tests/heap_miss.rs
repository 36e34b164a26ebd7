//! In which order a miss looks for memory, seen from where chunks come from; and that asking others to give way, which may take
//! long, holds up nobody who has another way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod heap_lab;

use std::os::fd::OwnedFd;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex};

use heap_lab::{oom, until, Words, CHUNK, CONFIG, MIB, WINDOW};
use millpond_allocator::driver::host::{HostCall, HostConfig, HostDriver, HostPlatform};
use millpond_allocator::driver::{Access, CuResult, Driver, Stream};
use millpond_allocator::heap::{ChunkSource, GrowError, Heap, LocalSource, PoolId};
use millpond_allocator::timeline::{Signal, Slots, Timelines};
use millpond_allocator::window::{Chunk, Window};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    /// A growth: whether it pressed, whether it was granted.
    Grow { press: bool, granted: bool },
    /// Chunks came back.
    Back(u64),
}
use Said::{Back, Grow};

const AT_ONCE: Said = Grow { press: false, granted: true };
const NO_ROOM: Said = Grow { press: false, granted: false };
const PRESSED: Said = Grow { press: true, granted: true };
const IN_VAIN: Said = Grow { press: true, granted: false };

/// An owner among whose clients there is an idle one: who presses gets room.
#[derive(Debug)]
struct Source {
    local: LocalSource,
    said: Mutex<Vec<Said>>,
    /// What the idle one gives way by.
    slack: Mutex<u64>,
    /// Where pressing takes long: says that it has begun, then waits for a word.
    slow: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl ChunkSource for Source {
    fn grow(&self, bytes: u64, press: bool) -> Result<Vec<(Chunk, OwnedFd)>, GrowError> {
        if press {
            if let Some((begun, go)) = &*self.slow.lock().unwrap() {
                begun.send(()).unwrap();
                go.recv().unwrap();
            }
            let slack = std::mem::take(&mut *self.slack.lock().unwrap());
            if slack > 0 {
                self.local.set_limit(self.local.counts().reserved + slack);
            }
        }
        let grown = self.local.grow(bytes, press);
        self.said.lock().unwrap().push(Grow { press, granted: grown.is_ok() });
        grown
    }

    fn give_back(&self, chunks: &[Chunk]) {
        self.said.lock().unwrap().push(Back(chunks.iter().map(|chunk| chunk.bytes).sum()));
        self.local.give_back(chunks);
    }

    fn holders(&self) -> String {
        "Held by idle (pid 7): 1.00 GiB.".to_owned()
    }
}

struct Lab {
    heap: Heap,
    source: Arc<Source>,
    driver: Arc<HostDriver>,
    _platform: HostPlatform,
}

impl Lab {
    fn new() -> Self {
        Self::with(|_| None)
    }

    fn with(timelines: impl FnOnce(&Arc<HostDriver>) -> Option<Arc<Timelines>>) -> Self {
        let platform = HostPlatform::new(HostConfig { total_bytes: Some(64 << 30), ..HostConfig::default() });
        let driver = platform.driver(0).unwrap();
        driver.attach_context().unwrap();
        let local = LocalSource::new(driver.clone(), WINDOW, CONFIG.chunk_bytes);
        let source = Arc::new(Source { local, said: Mutex::default(), slack: Mutex::default(), slow: Mutex::default() });
        let window = Window::reserve(driver.clone(), WINDOW, Access::ReadWrite).unwrap();
        let timelines = timelines(&driver);
        let heap = Heap::new(driver.clone(), window, source.clone(), None, timelines, CONFIG);
        Self { heap, source, driver, _platform: platform }
    }

    /// No room from here on, but what who presses gets.
    fn freeze(&self, slack: u64) {
        self.source.local.set_limit(self.source.local.counts().reserved);
        *self.source.slack.lock().unwrap() = slack;
        self.source.said.lock().unwrap().clear();
    }

    fn said(&self) -> Vec<Said> {
        std::mem::take(&mut self.source.said.lock().unwrap())
    }

    fn streams(&self) -> [Stream; 3] {
        [(); 3].map(|()| self.driver.stream_create().unwrap())
    }
}

#[test]
fn where_there_is_room_nobody_is_pressed() {
    let lab = Lab::new();
    let [one, two, _] = lab.streams();
    lab.heap.allocate(CHUNK, one).unwrap();
    lab.heap.allocate(2 * CHUNK, two).unwrap();
    assert_eq!(lab.said(), [AT_ONCE, AT_ONCE]);
}

/// One block of another's, a block over several chunks, and pieces of two streams that only together are enough.
#[test]
fn a_gpu_wait_comes_before_others_are_pressed() {
    for (freed, wanted) in [([CHUNK, 0], CHUNK), ([CHUNK, 0], MIB), ([3 * CHUNK, 0], 3 * CHUNK), ([CHUNK, CHUNK], 2 * CHUNK)] {
        let lab = Lab::new();
        let [one, two, three] = lab.streams();
        let blocks: Vec<_> = [one, two].into_iter().zip(freed).filter(|(_, bytes)| *bytes > 0).collect();
        let blocks: Vec<_> = blocks.iter().map(|(stream, bytes)| (*stream, lab.heap.allocate(*bytes, *stream).unwrap())).collect();
        lab.freeze(CHUNK.max(wanted));
        let stalls: Vec<_> = blocks.iter().map(|(stream, _)| lab.driver.stall(*stream)).collect();
        blocks.iter().for_each(|(_, block)| lab.heap.free(*block).unwrap());
        assert_eq!(lab.heap.allocate(wanted, three), Ok(blocks[0].1), "{freed:?} {wanted}");
        let said = lab.said();
        assert!(!said.is_empty() && said.iter().all(|said| *said == NO_ROOM), "{freed:?} {wanted}: {said:?}");
        // Now nothing is left.
        lab.heap.allocate(CHUNK.max(wanted), three).unwrap();
        assert_eq!(lab.said().last(), Some(&PRESSED), "{freed:?} {wanted}");
        drop(stalls);
    }
}

#[test]
fn own_free_chunks_go_back_before_others_are_pressed() {
    let lab = Lab::new();
    let [stream, ..] = lab.streams();
    let [a, _hole, b] = [(); 3].map(|()| lab.heap.allocate(CHUNK, stream).unwrap());
    lab.freeze(2 * CHUNK);
    lab.heap.free(a).unwrap();
    lab.heap.free(b).unwrap();
    lab.driver.stream_synchronize(stream).unwrap();
    lab.heap.allocate(2 * CHUNK, stream).unwrap();
    assert_eq!(lab.said(), [NO_ROOM, Back(2 * CHUNK), PRESSED]);
}

/// Where this stream may not be made to wait: in a capture, and while any stream stands behind a timeline.
#[test]
fn where_no_gpu_wait_may_be_others_are_pressed() {
    let words: Arc<Words> = Arc::default();
    let mut timelines = None;
    let lab = Lab::with(|driver| {
        timelines = Some(Arc::new(Timelines::new(driver.clone(), words.clone(), Arc::new(Slots::new(0, 4))).unwrap()));
        timelines.clone()
    });
    let [one, two, three] = lab.streams();
    let left = lab.heap.allocate(CHUNK, one).unwrap();
    let stall = lab.driver.stall(one);
    lab.heap.free(left).unwrap();

    let pool = PoolId { graph: 1, user: 0 };
    lab.freeze(CHUNK);
    lab.heap.begin_pool(pool);
    lab.driver.begin_capture(two).unwrap();
    assert_ne!(lab.heap.allocate(CHUNK, two), Ok(left));
    lab.driver.end_capture(two).unwrap();
    lab.heap.end_pool(pool);
    assert_eq!(lab.said(), [NO_ROOM, PRESSED]);

    lab.freeze(CHUNK);
    timelines.unwrap().wait(three, Signal { timeline: 9, value: 1 }).unwrap();
    assert_ne!(lab.heap.allocate(CHUNK, two), Ok(left));
    assert_eq!(lab.said(), [NO_ROOM, PRESSED]);
    words.0[9].store(1);
    stall.release();
}

/// One thread presses, which takes as long as others take to answer; another has bytes in reach behind a GPU wait.
#[test]
fn who_waits_for_others_to_give_way_holds_up_nobody() {
    let lab = Lab::new();
    let [one, two, three] = lab.streams();
    let block = lab.heap.allocate(CHUNK, one).unwrap();
    lab.freeze(2 * CHUNK);
    let ((begun, has_begun), (go, gone)) = (channel(), channel());
    *lab.source.slow.lock().unwrap() = Some((begun, gone));
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| lab.heap.allocate(2 * CHUNK, two));
        has_begun.recv().unwrap();
        let stall = lab.driver.stall(one);
        lab.heap.free(block).unwrap();
        assert_eq!(lab.heap.allocate(CHUNK, three), Ok(block), "while the other still waits");
        assert!(!slow.is_finished());
        go.send(()).unwrap();
        slow.join().unwrap().unwrap();
        stall.release();
    });
}

/// What the heap refuses by itself says who holds what, as the owner's refusal does.
#[test]
fn every_refusal_of_the_heap_names_the_holders() {
    let lab = Lab::new();
    let [stream, ..] = lab.streams();
    lab.heap.set_limit(CHUNK);
    let figures = oom(lab.heap.allocate(2 * CHUNK, stream));
    assert_eq!(figures.detail, "It is this process's own limit. Held by idle (pid 7): 1.00 GiB.");
    assert_eq!(lab.said(), [], "nobody is asked for what this process may not have");
    lab.heap.set_limit(u64::MAX);
    (1..9).for_each(|n| lab.driver.fail_nth(HostCall::Map, n, CuResult::OUT_OF_MEMORY));
    let figures = oom(lab.heap.allocate(CHUNK, stream));
    assert!(figures.detail.ends_with("Held by idle (pid 7): 1.00 GiB."), "{}", figures.detail);
    lab.freeze(0);
    oom(lab.heap.allocate(CHUNK, stream));
    assert_eq!(lab.said().last(), Some(&IN_VAIN));
    until("an end of the staged failures", || {
        *lab.source.slack.lock().unwrap() = CHUNK;
        lab.heap.allocate(CHUNK, stream).is_ok()
    });
}
