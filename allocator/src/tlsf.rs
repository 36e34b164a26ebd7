//! TLSF.
