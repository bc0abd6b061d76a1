//! The fake libcuda in real time, as examples and benches use it: the device runs by itself, at the rates
//! that were set before its first use.
#![cfg(all(feature = "cudarc", target_os = "linux"))]

use cudarc::driver::CudaContext;
use fake_cuda::control::Control;
use std::time::{Duration, Instant};

const LATENCY: Duration = Duration::from_millis(2);

#[test]
fn the_device_runs_by_itself_at_the_rates_that_were_set() {
    let fake = Control::load().expect("cargo builds the fake library beside the tests");
    assert!(fake.set_real_time(LATENCY, 10_000_000_000, Duration::from_nanos(100)));
    let context = CudaContext::new(0).unwrap();
    assert!(!fake.set_stepped(), "too late: the device exists");

    let threads: Vec<_> = (1..=4_u8)
        .map(|fill| {
            let context = context.clone();
            std::thread::spawn(move || {
                let stream = context.new_stream().unwrap();
                for round in 0..10 {
                    let sent = vec![fill * round; 50_000];
                    let on_device = stream.clone_htod(&sent).unwrap();
                    assert_eq!(stream.clone_dtoh(&on_device).unwrap(), sent);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }

    let stream = context.new_stream().unwrap();
    let on_device = stream.alloc_zeros::<u8>(4096).unwrap();
    stream.synchronize().unwrap();
    let start = Instant::now();
    let copy = stream.clone_dtod(&on_device).unwrap();
    let enqueued = start.elapsed();
    stream.synchronize().unwrap();
    assert!(start.elapsed() >= LATENCY, "the copy took {:?}", start.elapsed());
    assert!(enqueued < start.elapsed(), "enqueueing does not wait for the copy");
    drop(copy);
    fake.assert_clean();
}
