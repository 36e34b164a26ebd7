//! What a C++ caller sees of `millpond_malloc` where there is no memory, through a real C++ compiler's frames.
//!
//! Without torch it is `std::runtime_error`. `MILLPOND_TORCH_LIB=DIR`, the `torch/lib` of an installed torch, makes it torch's
//! own exception (`make test-torch`).

#![allow(clippy::unwrap_used)] // a test's own helpers

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library beside the test's own binary: cargo builds it for integration tests.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libmillpond_torch.so")
}

/// Stand-ins for CUDA's runtime, which torch's libraries name and a machine without CUDA lacks: nothing of it is called here.
fn runtime_stand_ins(folder: &Path) {
    for version in ["11.0", "12", "13"] {
        let (map, source) = (folder.join("map"), folder.join("none.c"));
        std::fs::write(&map, format!("libcudart.so.{version} {{ global: *; }};")).unwrap();
        std::fs::write(&source, "void none(void) {}").unwrap();
        let name = format!("libcudart.so.{version}");
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-o"]).arg(folder.join(&name)).arg(&source);
        compiler.args([format!("-Wl,-soname,{name}"), format!("-Wl,--version-script={}", map.display())]);
        assert!(compiler.status().unwrap().success());
    }
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
    let mut command = Command::new(&program);
    command.arg(library()).args(torch);
    let stand_ins = program.with_extension("d");
    if let Some(folder) = torch.first().and_then(|library| library.parent()) {
        std::fs::create_dir_all(&stand_ins).unwrap();
        runtime_stand_ins(&stand_ins);
        command.env("LD_LIBRARY_PATH", format!("{}:{}", folder.display(), stand_ins.display()));
    }
    let output = command.output().unwrap();
    let _ = std::fs::remove_file(&program);
    let _ = std::fs::remove_dir_all(&stand_ins);
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
    let Some(said) = run(&["libc10.so", "libc10_cuda.so"].map(|name| Path::new(&folder).join(name))) else { return };
    assert!(said.contains("detached: St13runtime_error"), "what is no lack of memory is a RuntimeError: {said}");
    assert_eq!(said.matches("out of memory: N3c1016OutOfMemoryErrorE says CUDA out of memory. Tried to allocate").count(), 3, "{said}");
    assert!(said.contains("and then: memory"), "{said}");
}
