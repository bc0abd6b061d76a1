//! Re-zeroing: plain stores when small, non-temporal stores when large.
//!
//! Below the threshold the next fill pays for non-temporal stores with cold cache lines; above it plain
//! stores read every line first and throw the caller's cache out. Measured on 16 MiB: 6.3 against
//! 26 GB/s (`docs/architecture.md`).
#![allow(unsafe_code)] // Non-temporal stores are intrinsics.

/// From this many bytes on, the stores bypass the caches.
pub(crate) const NON_TEMPORAL_FROM_BYTES: usize = 8 << 20;

/// The most that is zeroed in one piece, so that a zeroing thread can look around in between.
pub(crate) const STEP_BYTES: usize = 1 << 20;

/// Sets all bytes to zero; `whole_bytes` is the size of the job that `bytes` is a piece of.
pub(crate) fn zero(bytes: &mut [u8], whole_bytes: usize) {
    if whole_bytes >= NON_TEMPORAL_FROM_BYTES {
        zero_non_temporal(bytes);
    } else {
        bytes.fill(0);
    }
}

#[cfg(target_arch = "x86_64")]
fn zero_non_temporal(bytes: &mut [u8]) {
    use std::arch::x86_64::{__m128i, _mm_setzero_si128, _mm_sfence, _mm_stream_si128};

    // SAFETY: sixteen zero bytes are a valid `__m128i`, and the other way round.
    let (head, body, tail) = unsafe { bytes.align_to_mut::<__m128i>() };
    head.fill(0);
    tail.fill(0);
    // SAFETY: SSE2 is part of every x86-64 processor.
    let nothing = unsafe { _mm_setzero_si128() };
    for vector in body {
        // SAFETY: the reference is to sixteen writable bytes, aligned to sixteen by `align_to_mut`.
        unsafe { _mm_stream_si128(vector, nothing) };
    }
    // Streaming stores are weakly ordered; the fence makes them visible before the block changes hands.
    // SAFETY: SSE is part of every x86-64 processor.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn zero_non_temporal(bytes: &mut [u8]) {
    bytes.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_no_other_is_zeroed_at_any_alignment() {
        for whole_bytes in [0, NON_TEMPORAL_FROM_BYTES] {
            for start in 0..17 {
                for len in [0, 1, 15, 16, 17, 63, 1000] {
                    let mut buffer = vec![7u8; 1100];
                    zero(&mut buffer[start..start + len], whole_bytes);
                    let zeros = buffer.iter().filter(|byte| **byte == 0).count();
                    assert_eq!(zeros, len);
                    assert!(buffer[start..start + len].iter().all(|byte| *byte == 0));
                }
            }
        }
    }
}
