//! What a C++ caller sees of `millpond_malloc` where there is no memory, through a real C++ compiler's frames.
//!
//! Without torch it is `std::runtime_error`. `MILLPOND_TORCH_LIB=DIR`, the `torch/lib` of an installed torch, makes it torch's
//! own exception (`make test-torch`).

#![allow(clippy::unwrap_used)] // a test's own helpers

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library beside the test's own binary: cargo builds it for integration tests.
fn library() -> PathBuf {
    let binary = std::env::current_exe().unwrap();
    binary.ancestors().find(|folder| folder.ends_with("deps")).and_then(Path::parent).unwrap().join("libmillpond_torch.so")
}

fn run(torch: &[PathBuf]) -> Option<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/throw.cpp");
    let program = std::env::temp_dir().join(format!("millpond-throw-{}-{}", std::process::id(), torch.len()));
    let built = Command::new("c++").args(["-std=c++17", "-O1", "-o"]).arg(&program).arg(&source).arg("-ldl").status();
    let Ok(built) = built else {
        println!("no c++ here");
        return None;
    };
    assert!(built.success(), "throw.cpp does not compile");
    let output = Command::new(&program).arg(library()).args(torch).output().unwrap();
    let _ = std::fs::remove_file(&program);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Some(text)
}

#[test]
fn without_torch_it_is_a_runtime_error_each_time_and_work_goes_on() {
    let Some(said) = run(&[]) else { return };
    assert!(said.contains("detached: St13runtime_error says this process is not attached"), "{said}");
    assert_eq!(said.matches("out of memory: St13runtime_error says CUDA out of memory. Tried to allocate").count(), 3, "{said}");
    assert!(said.contains("and then: memory"), "{said}");
}

#[test]
fn with_torch_it_is_torchs_own() {
    let Some(folder) = std::env::var_os("MILLPOND_TORCH_LIB") else {
        println!("MILLPOND_TORCH_LIB is not set");
        return;
    };
    let Some(said) = run(&[Path::new(&folder).join("libc10.so")]) else { return };
    assert!(said.contains("detached: St13runtime_error"), "what is no lack of memory is a RuntimeError: {said}");
    assert_eq!(said.matches("out of memory: N3c1016OutOfMemoryErrorE says CUDA out of memory. Tried to allocate").count(), 3, "{said}");
    assert!(said.contains("and then: memory"), "{said}");
}
