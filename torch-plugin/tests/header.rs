//! The header that is checked in is the one that the source makes. `MILLPOND_WRITE_HEADER=1` writes it (`make header`).

use std::path::Path;

#[test]
fn the_header_is_current() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::Builder::new().with_crate(here).with_config(config).generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = here.join("include/millpond.h");
    if std::env::var_os("MILLPOND_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    assert!(std::fs::read_to_string(&path).unwrap() == made, "include/millpond.h is not what src makes: run `make header`");
}

#[test]
fn a_c_compiler_takes_the_header() {
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/millpond.h");
    for (compiler, language) in [("cc", "c"), ("c++", "c++")] {
        let status = std::process::Command::new(compiler).args(["-fsyntax-only", "-Wall", "-Werror", "-x", language]).arg(&header).status();
        match status {
            Ok(status) => assert!(status.success(), "{compiler} refuses the header"),
            Err(error) => println!("no {compiler} here: {error}"),
        }
    }
}
