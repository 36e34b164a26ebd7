//! torch's hooks over a real heap. One test: a process has one client.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::{c_void, CString};
use std::ptr::null;

use millpond_torch::cache_info::largest_block;
use millpond_torch::control::millpond_control;
use millpond_torch::error::millpond_string_free;
use millpond_torch::segments;
use millpond_torch::state;
use millpond_torch::tensor::millpond_deallocate;
use millpond_torch::torch::{
    millpond_free, millpond_pool_id, millpond_pool_malloc, millpond_torch_begin_allocate_stream_to_pool,
    millpond_torch_begin_allocate_to_pool, millpond_torch_capture_failed, millpond_torch_end_allocate_stream_to_pool,
    millpond_torch_end_allocate_to_pool, millpond_torch_release_pool,
};

const HOST: i32 = -1;

fn control(request: &str) -> serde_json::Value {
    let request = CString::new(request).unwrap();
    // SAFETY: a terminated text; the answer is ours to free.
    unsafe {
        let answer = millpond_control(request.as_ptr());
        assert!(!answer.is_null(), "{request:?}");
        let value = serde_json::from_slice(std::ffi::CStr::from_ptr(answer).to_bytes()).unwrap();
        millpond_string_free(answer);
        value
    }
}

const fn pool(graph: u64) -> millpond_pool_id {
    millpond_pool_id { graph, user: 0 }
}

fn stream(number: usize) -> *mut c_void {
    number as *mut c_void
}

fn capturing() -> bool {
    state::heap(HOST).unwrap().unless_capturing(|| ()).is_none()
}

#[test]
fn captures_are_known_from_begin_to_end_and_segments_from_malloc_to_free() {
    let served = control(r#"{"op": "serve_inline", "driver": "host", "limit": "64MiB"}"#);
    let (socket, key) = (&served["socket"], &served["key"]);
    control(&format!(r#"{{"op": "attach", "socket": {socket}, "key": {key}, "name": "hooks", "role": "parent"}}"#));

    // Since torch 2.3: by pool.
    assert!(!capturing());
    millpond_torch_begin_allocate_to_pool(HOST, pool(1), null());
    assert!(capturing());
    millpond_torch_end_allocate_to_pool(HOST, pool(2));
    assert!(capturing(), "another pool's end");
    millpond_torch_end_allocate_to_pool(HOST, pool(1));
    assert!(!capturing());

    // One that failed ends without a word of torch's: its thread says so.
    millpond_torch_begin_allocate_to_pool(HOST, pool(8), null());
    std::thread::spawn(|| millpond_torch_capture_failed()).join().unwrap();
    assert!(capturing(), "another thread's word");
    millpond_torch_capture_failed();
    assert!(!capturing());
    millpond_torch_capture_failed();

    // Before: by stream, which alone is named at the end.
    millpond_torch_begin_allocate_stream_to_pool(HOST, stream(7), pool(3));
    assert!(capturing());
    millpond_torch_end_allocate_stream_to_pool(HOST, stream(8));
    assert!(capturing(), "another stream's end");
    millpond_torch_end_allocate_stream_to_pool(HOST, stream(7));
    assert!(!capturing());
    millpond_torch_end_allocate_stream_to_pool(HOST, stream(7));
    // One that failed is followed by another on the same stream, whose end is its own.
    millpond_torch_begin_allocate_stream_to_pool(HOST, stream(7), pool(4));
    millpond_torch_begin_allocate_stream_to_pool(HOST, stream(7), pool(5));
    millpond_torch_end_allocate_stream_to_pool(HOST, stream(7));
    assert!(!capturing());
    // Two at once, on two threads.
    let other = || std::thread::spawn(|| millpond_torch_begin_allocate_stream_to_pool(HOST, stream(9), pool(6))).join().unwrap();
    millpond_torch_begin_allocate_stream_to_pool(HOST, stream(7), pool(7));
    other();
    millpond_torch_end_allocate_stream_to_pool(HOST, stream(7));
    assert!(capturing(), "the other thread's is on");
    millpond_torch_end_allocate_stream_to_pool(HOST, stream(9));
    assert!(!capturing());
    (1..8).for_each(|graph| millpond_torch_release_pool(HOST, pool(graph)));

    // Pool mode: what torch got for its own cutting up is known as that until it is freed.
    assert!(!segments::any());
    let segment = millpond_pool_malloc(2 << 20, HOST, stream(0)) as u64;
    assert!(segment != 0 && segments::holds(segment) && segments::holds(segment + (2 << 20) - 1));
    let asked = control(&format!(r#"{{"op": "lent", "ranges": [[{segment}, 100], [64, 1]]}}"#));
    assert_eq!(asked.to_string(), r#"{"lent":[false,false],"segment":[true,false]}"#);
    assert!(millpond_pool_malloc(1 << 40, HOST, stream(0)).is_null(), "no room: null, and torch goes on");
    assert_eq!(millpond_deallocate(segment), 0);
    assert!(!segments::any());

    // A pool that ends: torch frees each of its segments once, on whatever thread, and each goes back.
    let counts = || {
        let stats = control(r#"{"op": "stats", "device": -1}"#);
        ["allocated", "freed", "current"].map(|count| stats[format!("allocation.all.{count}")].as_u64().unwrap())
    };
    let [allocated, freed, _] = counts();
    assert_eq!(allocated, freed);
    let taken: Vec<u64> = std::thread::scope(|scope| {
        let take = || (0..5).map(|_| millpond_pool_malloc(1 << 20, HOST, stream(0)) as u64).collect::<Vec<_>>();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!((taken.contains(&0), counts()), (false, [allocated + 20, freed, 20]));
    std::thread::scope(|scope| {
        for segments in taken.chunks(7) {
            scope.spawn(|| segments.iter().for_each(|segment| millpond_free(*segment as *mut c_void, 1 << 20, HOST, stream(0))));
        }
    });
    assert_eq!((segments::any(), counts()), (false, [allocated + 20, freed + 20, 0]));

    // What torch is told of free memory ends at the limits: the arena's 64 MiB, then a fraction.
    let at_hand = || control(r#"{"op": "at_hand", "device": -1}"#)["room"].as_u64().unwrap() >> 20;
    let largest = || largest_block(HOST).unwrap() >> 20;
    control(r#"{"op": "trim", "device": -1}"#);
    assert_eq!((at_hand(), largest()), (64, 64));
    state::heap(HOST).unwrap().set_limit(48 << 20);
    assert_eq!((at_hand(), largest()), (48, 48));
    let half = millpond_pool_malloc(32 << 20, HOST, stream(0));
    assert_eq!((at_hand(), largest()), (16, 16));
    millpond_free(half, 32 << 20, HOST, stream(0));
    assert_eq!((at_hand(), largest()), (16, 32), "a free block");
    assert_eq!(control(r#"{"op": "at_hand", "device": 40}"#).to_string(), r#"{"bytes":0,"room":null}"#, "no such device");
    control(r#"{"op": "detach"}"#);
    control(r#"{"op": "stop_inline"}"#);
}
