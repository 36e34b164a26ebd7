//! millpond between processes: the [`wire`], the [`control`] memory that all share, the [`owner`] and the [`client`]; the
//! [`ledger`], which an [`observer`] reads without either's help.
#![deny(unsafe_code)]

pub mod client;
pub mod control;
pub mod counts;
pub mod doctor;
pub mod ledger;
pub mod lends;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod nvml;
pub mod observer;
pub mod owner;
pub mod picture;
pub mod stress;
pub mod trace;
pub mod wire;
