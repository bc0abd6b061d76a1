//! The statistics as text, for a log or a terminal.

use super::Stats;
use crate::placement::{HugePagesInUse, NumaInUse};
use std::fmt;

impl fmt::Display for Stats {
    /// A few lines with the numbers that one looks at first; classes in use follow, one a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let takes = self.hits + self.unpinned_hits + self.harvested + self.misses;
        write!(
            f,
            "takes {takes}: {} hits, {} unpinned hits, {} harvested, {} misses ",
            self.hits, self.unpinned_hits, self.harvested, self.misses
        )?;
        if takes == 0 {
            // A rate of 100 %, which is what `hit_rate` has for nothing, would look like praise.
            writeln!(f, "(nothing was taken yet)")?;
        } else {
            writeln!(f, "({:.1} % without fresh memory)", self.hit_rate() * 100.0)?;
        }
        writeln!(
            f,
            "memory: {} idle ({} buffers), {} out ({}), {} queued ({}), {} retiring, {} held for graphs, {} quarantined",
            Bytes(self.pooled_bytes),
            self.pooled_buffers,
            Bytes(self.checked_out_bytes),
            self.checked_out_buffers,
            Bytes(self.queued_bytes),
            self.queued_buffers,
            Bytes(self.retiring_bytes),
            Bytes(self.held_bytes),
            Bytes(self.quarantined_bytes)
        )?;
        writeln!(
            f,
            "page-locked: {} now, {} at most, {}{}; {} registrations ({} refused) in {:.1?}, {} unregistrations ({} failed)",
            Bytes(self.registered_bytes),
            Bytes(self.peak_registered_bytes),
            self.backing,
            Exceptions(self),
            self.registrations,
            self.registration_failures,
            self.register_time,
            self.unregistrations,
            self.unregistration_failures
        )?;
        write!(
            f,
            "let go: {} evicted, {} aged out, {} passed over; failures: {} records, {} waits; zeroed {} in {:.1?}",
            self.evictions,
            self.aged_out,
            self.passed_over,
            self.record_failures,
            self.wait_failures,
            Bytes(usize::try_from(self.zeroed_bytes).unwrap_or(usize::MAX)),
            self.zero_time
        )?;
        for class in &self.classes {
            write!(
                f,
                "\n  {}: {} idle, {} out, {} queued; {} hits, {} harvested, {} misses",
                Bytes(class.class_bytes),
                class.pooled_buffers,
                class.checked_out_buffers,
                class.queued_buffers,
                class.hits + class.unpinned_hits,
                class.harvested,
                class.misses
            )?;
        }
        Ok(())
    }
}

/// What of the memory's place is not as it was asked for, or not as usual.
struct Exceptions<'a>(&'a Stats);

impl fmt::Display for Exceptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.huge_pages == HugePagesInUse::Refused {
            write!(f, ", {}", self.0.huge_pages)?;
        }
        if self.0.numa != NumaInUse::Anywhere {
            write!(f, ", {}", self.0.numa)?;
        }
        Ok(())
    }
}

/// A number of bytes in the largest unit that keeps it above one.
struct Bytes(usize);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let Some(power) = (self.0.max(1).ilog2() / 10).checked_sub(1) else {
            return write!(f, "{} B", self.0);
        };
        let unit_bytes = 1usize << (10 * (power + 1));
        if self.0.is_multiple_of(unit_bytes) {
            write!(f, "{} {}", self.0 / unit_bytes, UNITS[power as usize])
        } else {
            write!(f, "{:.1} {}", self.0 as f64 / unit_bytes as f64, UNITS[power as usize])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::ClassStats;

    #[test]
    fn bytes_are_shown_in_the_largest_unit_that_fits() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (4 << 30, "4 GiB")]
        {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(Bytes(usize::MAX).to_string(), "16.0 EiB");
    }

    #[test]
    fn a_pool_that_nobody_used_boasts_of_no_rate() {
        let unused = Stats::default();
        let first = unused.to_string().lines().next().map(str::to_owned);
        let expected = "takes 0: 0 hits, 0 unpinned hits, 0 harvested, 0 misses (nothing was taken yet)";
        assert_eq!(first.as_deref(), Some(expected));
        assert_eq!(unused.hit_rate(), 1.0, "nothing had to be mapped for nothing");
        let missed = Stats { misses: 1, ..Stats::default() };
        assert!(missed.to_string().contains("1 misses (0.0 % without fresh memory)"), "{missed}");
    }

    #[test]
    fn a_summary_has_the_numbers_that_one_looks_at_first() {
        let class = ClassStats { class_bytes: 65536, hits: 9, pooled_buffers: 2, ..ClassStats::default() };
        let stats = Stats {
            hits: 9,
            misses: 1,
            pooled_bytes: 2 << 16,
            pooled_buffers: 2,
            passed_over: 7,
            classes: vec![class],
            ..Stats::default()
        };
        let text = stats.to_string();
        let starts =
            ["takes 10: 9 hits", "memory: 128 KiB idle (2 buffers)", "page-locked: 0 B now", "let go: "];
        for (line, start) in text.lines().zip(starts) {
            assert!(line.starts_with(start), "{text}");
        }
        assert!(text.contains("(90.0 % without fresh memory)") && text.contains("7 passed over"), "{text}");
        assert!(
            text.ends_with("\n  64 KiB: 2 idle, 0 out, 0 queued; 9 hits, 0 harvested, 0 misses"),
            "{text}"
        );
    }
}
