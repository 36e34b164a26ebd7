//! Calls that fail on purpose, and calls that are noted.

use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use parking_lot::Mutex;

use crate::driver::CuResult;

macro_rules! calls {
    ($($variant:ident = $name:literal,)*) => {
        /// A call of the host driver: one for each method of [`crate::driver::Driver`] that can fail, and of its stream capture.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum HostCall {
            $($variant,)*
        }

        impl HostCall {
            /// The method's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            fn from_name(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

calls! {
    Devices = "devices",
    Open = "open",
    AttachContext = "attach_context",
    MemInfo = "mem_info",
    Create = "create",
    Export = "export",
    Import = "import",
    Release = "release",
    Reserve = "reserve",
    Unreserve = "unreserve",
    Map = "map",
    Unmap = "unmap",
    SetAccess = "set_access",
    PointerInfo = "pointer_info",
    StreamCreate = "stream_create",
    StreamDestroy = "stream_destroy",
    StreamId = "stream_id",
    StreamSynchronize = "stream_synchronize",
    StreamQuery = "stream_query",
    StreamCapture = "stream_capture",
    Copy = "copy",
    Fill = "fill",
    EventCreate = "event_create",
    EventDestroy = "event_destroy",
    EventRecord = "event_record",
    EventRecordContext = "event_record_context",
    EventQuery = "event_query",
    StreamWaitEvent = "stream_wait_event",
    HostRegister = "host_register",
    HostAddress = "host_address",
    HostUnregister = "host_unregister",
    WriteValue = "write_value",
    WaitValue = "wait_value",
    BeginCapture = "begin_capture",
    EndCapture = "end_capture",
    Replay = "replay",
}

/// Failures to stage, each at the n-th call of its kind: `create:3:2,map:1:1` is "the third `create` fails with
/// out of memory (2), the first `map` with invalid value (1)".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FailPlan(Vec<Failure>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Failure {
    call: HostCall,
    calls_left: u64,
    result: CuResult,
}

impl FailPlan {
    /// Nothing fails.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a failure of the n-th call (1: the first).
    #[must_use]
    pub fn fail_nth(mut self, call: HostCall, n: u64, result: CuResult) -> Self {
        self.0.push(Failure { call, calls_left: n.max(1), result });
        self
    }
}

/// Text that is no [`FailPlan`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no failure: expected call:n-th:code, such as create:3:2")]
pub struct ParseFailPlanError(String);

impl FromStr for FailPlan {
    type Err = ParseFailPlanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = |part: &str| {
            let mut fields = part.split(':').map(str::trim);
            let call = HostCall::from_name(fields.next()?)?;
            let n = fields.next()?.parse().ok().filter(|n| *n > 0)?;
            let result = fields.next()?.parse().ok().filter(|code| *code > 0).map(CuResult)?;
            fields.next().is_none().then_some((call, n, result))
        };
        let mut plan = Self::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (call, n, result) = parse(part).ok_or_else(|| ParseFailPlanError(part.to_owned()))?;
            plan = plan.fail_nth(call, n, result);
        }
        Ok(plan)
    }
}

/// The failures that are still to come, and the calls so far where somebody asks for them.
#[derive(Debug, Default)]
pub(super) struct Failures {
    armed: AtomicBool,
    pending: Mutex<Pending>,
}

#[derive(Debug, Default)]
struct Pending {
    plan: Vec<Failure>,
    /// Which thread made which call; `None`: nobody asks.
    calls: Option<Vec<(ThreadId, HostCall)>>,
}

impl Pending {
    fn is_armed(&self) -> bool {
        !self.plan.is_empty() || self.calls.is_some()
    }
}

impl Failures {
    pub(super) fn add(&self, plan: FailPlan) {
        let mut pending = self.pending.lock();
        pending.plan.extend(plan.0);
        self.armed.store(pending.is_armed(), Ordering::Release);
    }

    /// Notes calls from here on.
    pub(super) fn note_calls(&self) {
        self.pending.lock().calls = Some(Vec::new());
        self.armed.store(true, Ordering::Release);
    }

    /// Takes the calls that this thread has made, in their order.
    pub(super) fn take_calls(&self) -> Vec<HostCall> {
        let me = thread::current().id();
        let mut pending = self.pending.lock();
        let Some(calls) = pending.calls.as_mut() else { return Vec::new() };
        let (own, others): (Vec<_>, Vec<_>) = std::mem::take(calls).into_iter().partition(|(thread, _)| *thread == me);
        *calls = others;
        own.into_iter().map(|(_, call)| call).collect()
    }

    /// Counts one call; the result that it must fail with, if this is the one.
    pub(super) fn strike(&self, call: HostCall) -> Option<CuResult> {
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut pending = self.pending.lock();
        if let Some(calls) = pending.calls.as_mut() {
            calls.push((thread::current().id(), call));
        }
        let mut struck = None;
        pending.plan.retain_mut(|failure| {
            if failure.call == call {
                failure.calls_left -= 1;
                if failure.calls_left == 0 {
                    struck.get_or_insert(failure.result);
                }
            }
            failure.calls_left > 0
        });
        self.armed.store(pending.is_armed(), Ordering::Release);
        struck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_once() {
        let failures = Failures::default();
        failures.add("create:2:2, map:1:1".parse().unwrap());
        assert_eq!(failures.strike(HostCall::Create), None);
        assert_eq!(failures.strike(HostCall::Unmap), None);
        assert_eq!(failures.strike(HostCall::Create), Some(CuResult::OUT_OF_MEMORY));
        assert_eq!(failures.strike(HostCall::Create), None);
        assert_eq!(failures.strike(HostCall::Map), Some(CuResult::INVALID_VALUE));
        assert!(!failures.armed.load(Ordering::Relaxed));
    }

    #[test]
    fn calls_are_noted_by_thread_once_asked_for() {
        let failures = Failures::default();
        failures.strike(HostCall::Create);
        failures.note_calls();
        failures.add("map:1:1".parse().unwrap());
        assert_eq!((failures.strike(HostCall::Map), failures.strike(HostCall::Unmap)), (Some(CuResult::INVALID_VALUE), None));
        thread::scope(|scope| scope.spawn(|| failures.strike(HostCall::Copy)).join()).unwrap();
        assert_eq!(failures.take_calls(), [HostCall::Map, HostCall::Unmap]);
        assert_eq!(failures.take_calls(), []);
    }

    #[test]
    fn other_text_is_no_plan() {
        for text in ["create", "create:1", "create:0:2", "create:1:0", "destroy:1:2", "create:1:2:3", "create:x:2"] {
            assert!(text.parse::<FailPlan>().is_err(), "{text}");
        }
        assert_eq!("".parse(), Ok(FailPlan::new()));
    }
}
