//! The table, and the JSON object.

use crate::Summary;
use serde_json::json;

/// The value below which `share` (0 to 1) of the samples lie.
pub fn quantile<T: Copy + PartialOrd>(samples: &[T], share: f64) -> Option<T> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(|a, b| a.partial_cmp(b).expect("no NaN among times"));
    let index = ((sorted.len() as f64 * share) as usize).min(sorted.len().checked_sub(1)?);
    Some(sorted[index])
}

pub fn as_json(summary: &Summary) -> String {
    let Summary { device, options, pool, ready_us, outcomes: [pooled, vec, register], .. } = summary;
    let object = json!({
        "device": device.name,
        "simulated": device.is_simulated(),
        "simulator": device.constants(),
        "segments": options.segments,
        "bytes": options.bytes,
        "input_bytes": summary.input_bytes,
        "mismatches": summary.mismatches(),
        "violations": device.violations(),
        "in_flight": options.in_flight,
        "period_ms": options.period_ms,
        "warm_up": summary.warm_up,
        "hit_rate": summary.hit_rate(),
        "misses": pool.hits.iter().filter(|hit| !**hit).count(),
        "distinct_buffers": pool.pinned_addresses.len(),
        "pinned_bytes": summary.pinned_bytes,
        "take_ns_p50": quantile(&pool.take_ns, 0.5),
        "take_ns_p99": quantile(&pool.take_ns, 0.99),
        "drop_ns_p50": quantile(&pool.drop_ns, 0.5),
        "drop_ns_p99": quantile(&pool.drop_ns, 0.99),
        "ready_us_p50": quantile(ready_us, 0.5),
        "ready_us_p99": quantile(ready_us, 0.99),
        "pool_stage_ns_p50": quantile(&pooled.stage_ns, 0.5),
        "vec_stage_ns_p50": quantile(&vec.stage_ns, 0.5),
        "register_stage_ns_p50": quantile(&register.stage_ns, 0.5),
        "pool_mb_s": pooled.mb_s,
        "vec_mb_s": vec.mb_s,
        "register_mb_s": register.mb_s,
    });
    object.to_string()
}

pub fn as_table(summary: &Summary) -> String {
    let Summary { device, options, pool, ready_us, outcomes, .. } = summary;
    let mut lines = vec![
        format!(
            "{} segments of {} bytes, {} in flight, from {} bytes of input in {} files",
            options.segments, options.bytes, options.in_flight, summary.input_bytes, summary.input_files
        ),
        format!(
            "checksums: {} of {} segments came back right",
            summary.staged() - summary.mismatches(),
            summary.staged()
        ),
        String::new(),
        "pinpool                          p50          p99".into(),
    ];
    let mut row = |name: &str, unit: &str, p50: Option<f64>, p99: Option<f64>| {
        let shown = |value: Option<f64>| {
            value.map_or("-".into(), |v| format!("{v:.*} {unit}", usize::from(v < 100.0)))
        };
        lines.push(format!("  {name:<22}{:>13}{:>13}", shown(p50), shown(p99)));
    };
    let ns = |samples: &[u64], share| quantile(samples, share).map(|value| value as f64);
    row("take", "ns", ns(&pool.take_ns, 0.5), ns(&pool.take_ns, 0.99));
    row("drop", "ns", ns(&pool.drop_ns, 0.5), ns(&pool.drop_ns, 0.99));
    row("return to ready", "us", quantile(ready_us, 0.5), quantile(ready_us, 0.99));
    let misses = pool.hits.iter().filter(|hit| !**hit).count();
    lines.extend([
        format!(
            "  hit rate              {:.2} % after {} segments ({misses} misses in all)",
            summary.hit_rate() * 100.0,
            summary.warm_up
        ),
        format!(
            "  distinct buffers      {} page-locked, {} bytes",
            pool.pinned_addresses.len(),
            summary.pinned_bytes
        ),
        String::new(),
        "                       caller p50   caller p99         MB/s".into(),
    ]);
    for outcome in outcomes {
        let us = |share| ns(&outcome.stage_ns, share).unwrap_or(0.0) / 1e3;
        let (p50, p99) = (us(0.5), us(0.99));
        lines.push(format!("  {:<20}{p50:>10.1} us{p99:>10.1} us{:>13.0}", outcome.name, outcome.mb_s));
    }
    lines.push(
        "  caller: get memory, fill, enqueue the copy, let go. MB/s: over that and the waits for the device."
            .into(),
    );
    if let Some(constants) = device.constants() {
        lines
            .push(format!("  The device is SIMULATED ({constants}): its MB/s prove nothing about hardware;"));
        lines.push("  the caller's times and the hit rate are real.".into());
    }
    lines.join("\n")
}
