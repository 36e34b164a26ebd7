//! One event of a recording.

/// Words of an event with its number.
pub(super) const WORDS: usize = 8;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A block was handed out: address, bytes asked for, stream; `value`: bytes allocated since.
    Allocate = 1,
    /// A block was given back: address, bytes asked for, stream; `value`: bytes allocated since. [`Event::PENDING`]: something still uses
    /// it, and [`Kind::Reusable`] follows. [`Event::ELSEWHERE`]: a stream other than its own is among what does, `peer`: which one (of
    /// several, the one that was named last).
    Free = 2,
    /// Nothing uses the block any more.
    Reusable = 3,
    /// A chunk came: address, bytes, `value`: bytes reserved since, `peer`: microseconds that it took.
    Grow = 4,
    /// A chunk went back: address, bytes, `value`: bytes reserved since.
    Trim = 5,
    /// There was no memory: bytes asked for, stream; `value`: bytes allocated.
    OutOfMemory = 6,
    /// Bytes were lent to another process, before the frame leaves: offset in the window, bytes, `value`: the hold, `peer`: the
    /// receiver's slot.
    Send = 7,
    /// Bytes of another process were taken up: offset in its window, bytes, `value`: the hold, `peer`: the window.
    Receive = 8,
    /// They were let go: as [`Kind::Receive`]. Streams may still use them.
    Release = 9,
    /// Nobody holds the block that was lent any more: offset in the window, bytes.
    Returned = 10,
    /// Work waits for a timeline: stream, `value`: what for, `peer`: the timeline. [`Event::ON_CPU`]: a thread waited, for `bytes`
    /// nanoseconds; else the stream does, on the GPU.
    Wait = 11,
    /// A stream waits on the GPU for what other streams have freed: stream, bytes asked for.
    WaitForStreams = 12,
    /// A client of the arena died: `value`: its serial number, `peer`: its slot.
    Died = 13,
}

impl Kind {
    const ALL: [Self; 13] = [
        Self::Allocate,
        Self::Free,
        Self::Reusable,
        Self::Grow,
        Self::Trim,
        Self::OutOfMemory,
        Self::Send,
        Self::Receive,
        Self::Release,
        Self::Returned,
        Self::Wait,
        Self::WaitForStreams,
        Self::Died,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number).checked_sub(1)?).copied()
    }
}

/// One event. What a field means is said by its [`Kind`]; what is not used is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// When, in nanoseconds of the monotonic clock, which all processes of a machine share. 0 in [`super::record`]: now.
    pub time: u64,
    /// What happened.
    pub kind: Kind,
    /// Bits: [`Event::PENDING`], [`Event::ON_CPU`], [`Event::ELSEWHERE`].
    pub flags: u8,
    /// The GPU as this process counts; -1: the host device; -2: none.
    pub device: i16,
    /// The thread, as the system counts. 0 in [`super::record`]: this one.
    pub thread: u32,
    /// An address, or an offset in a window.
    pub addr: u64,
    /// Bytes.
    pub bytes: u64,
    /// The stream's identity; 0: the legacy stream.
    pub stream: u64,
    /// By the kind.
    pub value: u64,
    /// The call stack that led here, by its number in the text; 0: none was taken.
    pub stack: u32,
    /// By the kind.
    pub peer: u32,
}

impl Event {
    /// Something still uses the freed block.
    pub const PENDING: u8 = 1;
    /// A thread waited, not a stream.
    pub const ON_CPU: u8 = 2;
    /// A stream other than the block's own uses it.
    pub const ELSEWHERE: u8 = 4;

    /// An event of a kind on a device, now, with nothing else said.
    #[must_use]
    pub const fn new(kind: Kind, device: i16) -> Self {
        Self { time: 0, kind, flags: 0, device, thread: 0, addr: 0, bytes: 0, stream: 0, value: 0, stack: 0, peer: 0 }
    }

    pub(super) fn words(&self) -> [u64; WORDS - 1] {
        let device = u64::from(self.device as u16);
        let meta = self.kind as u64 | u64::from(self.flags) << 8 | device << 16 | u64::from(self.thread) << 32;
        let last = u64::from(self.stack) | u64::from(self.peer) << 32;
        [self.time, meta, self.addr, self.bytes, self.stream, self.value, last]
    }

    /// `None` for words that are no event.
    pub(super) fn of(words: [u64; WORDS - 1]) -> Option<Self> {
        let [time, meta, addr, bytes, stream, value, last] = words;
        Some(Self {
            time,
            kind: Kind::of(meta as u8)?,
            flags: (meta >> 8) as u8,
            device: (meta >> 16) as i16,
            thread: (meta >> 32) as u32,
            addr,
            bytes,
            stream,
            value,
            stack: last as u32,
            peer: (last >> 32) as u32,
        })
    }
}
