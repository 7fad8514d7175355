"""CPU kernels in C for decoding, sampling and training, their build, and tensor helpers for RoPE and attention."""
