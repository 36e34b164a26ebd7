//! millpond between processes: the [`wire`], the [`control`] memory that all share, the owner and the client.
#![deny(unsafe_code)]

pub mod control;
pub mod doctor;
pub mod ledger;
pub mod observer;
pub mod owner;
pub mod wire;
