//! Holds: one receiver's claim on a lease, changed by one compare-and-swap.

use super::atomic::{fence, AtomicU64, Ordering};

/// Where a hold is in its life. It only moves forward; a new life begins under a new generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum HoldState {
    /// Nobody's.
    Free = 0,
    /// Being made: its fields are not to be read yet.
    Making = 1,
    /// Made by the sender; the frame has not been taken up.
    InFlight = 2,
    /// The receiver has it.
    Held = 3,
    /// The receiver is done, once its DONE is reached.
    Done = 4,
}

/// The word of a hold: {generation, state, sender, receiver}.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HoldWord(pub u64);

impl HoldWord {
    /// A receiver that is not known yet.
    pub const ANYBODY: u8 = u8::MAX;

    /// Puts a word together.
    #[must_use]
    pub const fn new(generation: u32, state: HoldState, sender: u8, receiver: u8) -> Self {
        Self((generation as u64) << 32 | (receiver as u64) << 16 | (sender as u64) << 8 | state as u64)
    }

    /// Which life of the record this is.
    #[must_use]
    pub const fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Its state. A number that is none counts as done by nobody: free.
    #[must_use]
    pub const fn state(self) -> HoldState {
        match self.0 as u8 {
            1 => HoldState::Making,
            2 => HoldState::InFlight,
            3 => HoldState::Held,
            4 => HoldState::Done,
            _ => HoldState::Free,
        }
    }

    /// The client that made it.
    #[must_use]
    pub const fn sender(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// The client that it is for.
    #[must_use]
    pub const fn receiver(self) -> u8 {
        (self.0 >> 16) as u8
    }

    /// Whether it is a ticket of this client that nobody has taken up.
    #[must_use]
    pub const fn is_ticket_of(self, client: u32) -> bool {
        matches!(self.state(), HoldState::InFlight) && self.receiver() == Self::ANYBODY && self.sender() as u32 == client
    }

    /// The same life in another state.
    #[must_use]
    pub const fn with_state(self, state: HoldState) -> Self {
        Self(self.0 & !0xff | state as u64)
    }

    /// The same life with another receiver.
    #[must_use]
    pub const fn with_receiver(self, receiver: u8) -> Self {
        Self(self.0 & !0xff_0000 | (receiver as u64) << 16)
    }
}

/// One hold in a producer's table.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Hold {
    word: AtomicU64,
    /// The producer's number of the lease.
    pub lease: AtomicU64,
    /// The window that the bytes are in.
    pub window: AtomicU64,
    /// Where they start in it.
    pub offset: AtomicU64,
    /// How many they are.
    pub bytes: AtomicU64,
    /// DONE: the timeline plus one; zero: none, done at once.
    pub done_timeline: AtomicU64,
    /// DONE: the value.
    pub done_value: AtomicU64,
}

/// What a new hold says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// See [`Hold::lease`].
    pub lease: u64,
    /// See [`Hold::window`].
    pub window: u32,
    /// See [`Hold::offset`].
    pub offset: u64,
    /// See [`Hold::bytes`].
    pub bytes: u64,
}

impl Hold {
    /// A hold that nobody ever made, of words that the caller makes: for tests, since the real ones lie in shared memory.
    #[doc(hidden)]
    #[must_use]
    pub fn zeroed(word: impl Fn() -> AtomicU64) -> Self {
        Self { word: word(), lease: word(), window: word(), offset: word(), bytes: word(), done_timeline: word(), done_value: word() }
    }

    /// The word as it is now.
    #[must_use]
    pub fn word(&self) -> HoldWord {
        HoldWord(self.word.load(Ordering::Acquire))
    }

    /// Begins a life: free → in flight. `None` if it is not free (somebody else was first).
    pub fn make(&self, sender: u8, receiver: u8, claim: Claim) -> Option<u32> {
        let free = self.word();
        if free.state() != HoldState::Free {
            return None;
        }
        let generation = free.generation().wrapping_add(1);
        let making = HoldWord::new(generation, HoldState::Making, sender, receiver);
        if !self.swap(free, making) {
            return None;
        }
        // Whoever sees one of these sees that the life before is over.
        fence(Ordering::Release);
        self.lease.store(claim.lease, Ordering::Relaxed);
        self.window.store(u64::from(claim.window), Ordering::Relaxed);
        self.offset.store(claim.offset, Ordering::Relaxed);
        self.bytes.store(claim.bytes, Ordering::Relaxed);
        self.done_timeline.store(0, Ordering::Relaxed);
        self.done_value.store(0, Ordering::Relaxed);
        self.swap(making, making.with_state(HoldState::InFlight)).then_some(generation)
    }

    /// In flight → held, by the receiver. False: stale, foreign, or taken up already.
    pub fn take(&self, generation: u32, receiver: u8) -> bool {
        let word = self.word();
        word.generation() == generation
            && word.state() == HoldState::InFlight
            && word.receiver() == receiver
            && self.swap(word, word.with_state(HoldState::Held))
    }

    /// Whether the receiver holds it still. A write, so that whoever ends the hold later has seen what was done before this.
    pub fn confirm(&self, generation: u32, receiver: u8) -> bool {
        let word = self.word();
        word.generation() == generation && word.state() == HoldState::Held && word.receiver() == receiver && self.swap(word, word)
    }

    /// In flight or held → done, by the receiver. `done`: its timeline and value, `None` if nothing is queued on the bytes.
    pub fn finish(&self, generation: u32, receiver: u8, done: Option<(u32, u64)>) -> bool {
        let word = self.word();
        if word.generation() != generation || word.receiver() != receiver {
            return false;
        }
        if !matches!(word.state(), HoldState::InFlight | HoldState::Held) {
            return false;
        }
        if let Some((timeline, value)) = done {
            self.done_value.store(value, Ordering::Relaxed);
            self.done_timeline.store(u64::from(timeline) + 1, Ordering::Relaxed);
        }
        self.swap(word, word.with_state(HoldState::Done))
    }

    /// In flight → done, by the receiver, for a frame that it will never use. A hold that was taken up is left alone: another
    /// frame may name it again, but only the one that took it may end it.
    pub fn decline(&self, generation: u32, receiver: u8) -> bool {
        let word = self.word();
        word.generation() == generation
            && word.state() == HoldState::InFlight
            && word.receiver() == receiver
            && self.swap(word, word.with_state(HoldState::Done))
    }

    /// Ends a life on behalf of the dead: whatever state it is in, it is done, with nothing queued.
    pub fn bury(&self, word: HoldWord) -> bool {
        self.swap(word, word.with_state(HoldState::Done))
    }

    /// Done → free, by the producer (or by the owner in a dead producer's place).
    pub fn recycle(&self, word: HoldWord) -> bool {
        word.state() == HoldState::Done && self.swap(word, HoldWord::new(word.generation(), HoldState::Free, 0, 0))
    }

    /// Names the receiver of a hold that was made for anybody.
    pub fn assign(&self, generation: u32, receiver: u8) -> bool {
        let word = self.word();
        word.generation() == generation
            && word.state() == HoldState::InFlight
            && word.receiver() == HoldWord::ANYBODY
            && self.swap(word, word.with_receiver(receiver))
    }

    /// Whether it still stands for anybody. A write, for the same reason as in [`Hold::confirm`].
    pub fn confirm_open(&self, generation: u32) -> bool {
        let word = self.word();
        word.generation() == generation
            && word.state() == HoldState::InFlight
            && word.receiver() == HoldWord::ANYBODY
            && self.swap(word, word)
    }

    /// What the hold is on. `None` for a window number that none can have.
    #[must_use]
    pub fn claim(&self) -> Option<Claim> {
        Some(Claim {
            lease: self.lease.load(Ordering::Relaxed),
            window: u32::try_from(self.window.load(Ordering::Relaxed)).ok()?,
            offset: self.offset.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        })
    }

    /// The word and what the hold is on, for one who has no part in it: `None` where it changed meanwhile, since the rest may be of
    /// another life then.
    #[must_use]
    pub fn glance(&self) -> Option<(HoldWord, Claim)> {
        let word = self.word();
        let claim = self.claim();
        fence(Ordering::Acquire);
        (self.word() == word).then_some((word, claim?))
    }

    /// DONE, where one was recorded.
    #[must_use]
    pub fn done(&self) -> Option<(u32, u64)> {
        let timeline = u32::try_from(self.done_timeline.load(Ordering::Relaxed)).ok()?.checked_sub(1)?;
        Some((timeline, self.done_value.load(Ordering::Relaxed)))
    }

    fn swap(&self, from: HoldWord, to: HoldWord) -> bool {
        self.word.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}
