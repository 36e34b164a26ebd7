//! torch's CUDA allocator and the C API: the only extern C of millpond.
