//! What only a host device can do: stage what on a GPU takes luck or a kernel.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use super::capture::HostGraph;
use super::driver::HostDriver;
use super::fail::{FailPlan, HostCall};
use super::queue::{Op, Queue};
use crate::driver::{CuResult, Result, Stream};

/// A piece of work that runs until this is dropped: a slow stream, with no sleeping.
#[derive(Debug)]
#[must_use = "the stream goes on as soon as this is dropped"]
pub struct Stall {
    open: Arc<AtomicBool>,
    // None where the stream was not live.
    queue: Option<Arc<Queue>>,
}

impl Stall {
    /// Lets the stream go on.
    pub fn release(self) {}
}

impl Drop for Stall {
    fn drop(&mut self) {
        self.open.store(true, Ordering::Release);
        if let Some(queue) = self.queue.take().filter(|queue| !queue.is_forked()) {
            queue.wake();
        }
    }
}

impl HostDriver {
    /// Queues work that ends when the guard is dropped; work queued later waits for it. A stream that cannot be used gives a
    /// guard that holds nothing.
    pub fn stall(&self, stream: Stream) -> Stall {
        let open = Arc::new(AtomicBool::new(false));
        let call = HostCall::StreamSynchronize;
        let queue = self.live_queue(stream).filter(|queue| self.submit(call, queue, Op::Gate(Arc::clone(&open))).is_ok());
        Stall { open, queue }
    }

    fn live_queue(&self, stream: Stream) -> Option<Arc<Queue>> {
        self.queue(HostCall::StreamId, stream).ok()
    }

    /// How often a stream handle was used that was not live: each would have been a SIGSEGV on a GPU.
    #[must_use]
    pub fn misuse(&self) -> u64 {
        self.shared.streams.misuse()
    }

    /// Makes the n-th call from now (1: the next) fail, on any device of the platform. A result that kills a GPU's context kills
    /// this one's.
    pub fn fail_nth(&self, call: HostCall, n: u64, result: CuResult) {
        self.shared.failures.add(FailPlan::new().fail_nth(call, n, result));
    }

    /// Notes the calls that are made of any device of the platform, from here on.
    pub fn note_calls(&self) {
        self.shared.failures.note_calls();
    }

    /// The calls that this thread has made since [`HostDriver::note_calls`], or since it last asked, in their order.
    #[must_use]
    pub fn take_calls(&self) -> Vec<HostCall> {
        self.shared.failures.take_calls()
    }

    /// Starts to record a stream's work instead of running it.
    ///
    /// # Errors
    /// [`CuResult::STREAM_CAPTURE_UNSUPPORTED`] for the legacy stream, [`CuResult::ILLEGAL_STATE`] while it is being captured.
    pub fn begin_capture(&self, stream: Stream) -> Result<()> {
        let queue = self.queue(HostCall::BeginCapture, stream)?;
        self.captures.begin(queue.id()).map_err(|result| HostCall::BeginCapture.refuse(result))
    }

    /// Ends a capture, and gives what was recorded.
    ///
    /// # Errors
    /// [`CuResult::STREAM_CAPTURE_INVALIDATED`] where the capture was spoilt (it is over all the same),
    /// [`CuResult::ILLEGAL_STATE`] for a stream that is not being captured.
    pub fn end_capture(&self, stream: Stream) -> Result<HostGraph> {
        let queue = self.queue(HostCall::EndCapture, stream)?;
        self.captures.end(queue.id()).map_err(|result| HostCall::EndCapture.refuse(result))
    }

    /// Queues what was recorded, as it was: the same addresses, the same values.
    ///
    /// # Errors
    /// As for any queued work.
    pub fn replay(&self, graph: &HostGraph, stream: Stream) -> Result<()> {
        let queue = self.queue(HostCall::Replay, stream)?;
        graph.ops.iter().try_for_each(|op| self.submit(HostCall::Replay, &queue, op.clone()))
    }
}
