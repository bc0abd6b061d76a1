//! Rows, the bars they are held to, and how often each is measured.

/// How much is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// What the committed table is made with.
    Full,
    /// For CI: every row with few samples. Answers are checked, times are shown and not held to their bars.
    Quick,
    /// For `cargo test --benches`: everything runs once.
    Once,
}

impl Effort {
    pub fn pick<T>(self, full: T, quick: T, once: T) -> T {
        match self {
            Effort::Full => full,
            Effort::Quick => quick,
            Effort::Once => once,
        }
    }

    /// How often a row is measured for all its columns by turns, so that what else the machine does falls on each.
    pub fn turns(self) -> usize {
        self.pick(5, 2, 1)
    }
}

/// What a number of a row is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unit {
    Nanoseconds,
    Percent,
    GigabytesPerSecond,
    Count,
}

impl Unit {
    pub const ALL: [Self; 4] = [Self::Nanoseconds, Self::Percent, Self::GigabytesPerSecond, Self::Count];
}

/// What a row is held to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Bar {
    /// At most this much of that column's median.
    Of(&'static str, f64),
    /// At least this much of that column's median.
    AtLeastOf(&'static str, f64),
    AtMost(f64),
    AtLeast(f64),
}

/// One way of doing it: what it is called, and for each turn what was measured.
pub struct Column {
    pub name: &'static str,
    pub turns: Vec<Vec<f64>>,
}

impl Column {
    pub fn median(&self) -> f64 {
        median(self.turns.iter().flatten().copied())
    }

    pub fn sorted(&self) -> Vec<f64> {
        let mut all: Vec<f64> = self.turns.iter().flatten().copied().collect();
        all.sort_by(f64::total_cmp);
        all
    }
}

/// One row; its first column is pinpool's.
pub struct Row {
    pub name: String,
    pub unit: Unit,
    pub columns: Vec<Column>,
    pub bars: Vec<Bar>,
}

impl Row {
    pub fn pinpool(&self) -> f64 {
        self.columns[0].median()
    }

    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name == name)
    }

    /// pinpool's median over that of the first alternative.
    pub fn ratio(&self) -> Option<f64> {
        self.columns.get(1).map(|other| self.pinpool() / other.median())
    }

    /// The smallest and the largest ratio of one turn's medians.
    pub fn spread(&self) -> Option<(f64, f64)> {
        let other = self.columns.get(1)?;
        let of_turn = |turn: &Vec<f64>| median(turn.iter().copied());
        let ratios: Vec<f64> = self.columns[0]
            .turns
            .iter()
            .map(of_turn)
            .zip(other.turns.iter().map(of_turn))
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        let least = ratios.iter().copied().min_by(f64::total_cmp)?;
        Some((least, ratios.iter().copied().max_by(f64::total_cmp)?))
    }

    pub fn is_ok(&self) -> bool {
        self.bars.iter().all(|bar| self.meets(*bar))
    }

    /// What a bar comes to in the row's unit.
    pub fn limit(&self, bar: Bar) -> Option<f64> {
        match bar {
            Bar::Of(name, share) | Bar::AtLeastOf(name, share) => Some(share * self.column(name)?.median()),
            Bar::AtMost(limit) | Bar::AtLeast(limit) => Some(limit),
        }
    }

    fn meets(&self, bar: Bar) -> bool {
        let Some(limit) = self.limit(bar) else { return false };
        if Self::is_at_most(bar) { self.pinpool() <= limit } else { self.pinpool() >= limit }
    }

    /// Whether pinpool's number is to be small.
    pub fn is_at_most(bar: Bar) -> bool {
        matches!(bar, Bar::Of(..) | Bar::AtMost(_))
    }

    pub fn bar_text(&self) -> String {
        let one = |bar: &Bar| match bar {
            Bar::Of(name, most) => format!("at most {most} of {name}"),
            Bar::AtLeastOf(name, least) => format!("at least {least} of {name}"),
            Bar::AtMost(most) => format!("at most {}", shown(*most, self.unit)),
            Bar::AtLeast(least) => format!("at least {}", shown(*least, self.unit)),
        };
        self.bars.iter().map(one).collect::<Vec<_>>().join(", ")
    }
}

/// All rows of a run.
pub struct Suite {
    pub rows: Vec<Row>,
    pub effort: Effort,
    /// Rows whose name has this in it; all when nothing was asked for.
    pub wanted: String,
    /// What a reader of the table has to know besides.
    pub notes: Vec<String>,
}

/// One way of measuring a row: a turn's samples.
pub type Measure<'a> = (&'static str, Box<dyn FnMut() -> Vec<f64> + 'a>);

impl Suite {
    pub fn wants(&self, name: &str) -> bool {
        name.contains(&self.wanted)
    }

    /// Measures every column by turns.
    pub fn add(&mut self, name: &str, unit: Unit, bars: &[Bar], measures: Vec<Measure<'_>>) {
        self.add_turns(name, unit, bars, self.effort.turns(), measures);
    }

    /// As [`Self::add`], so many turns.
    pub fn add_turns(
        &mut self,
        name: &str,
        unit: Unit,
        bars: &[Bar],
        turns: usize,
        mut measures: Vec<Measure<'_>>,
    ) {
        if !self.wants(name) {
            return;
        }
        eprintln!("  {name}");
        let mut columns: Vec<Column> =
            measures.iter().map(|(name, _)| Column { name, turns: Vec::new() }).collect();
        for _ in 0..turns {
            for (column, (_, measure)) in columns.iter_mut().zip(&mut measures) {
                column.turns.push(measure());
            }
        }
        self.rows.push(Row { name: name.to_owned(), unit, columns, bars: bars.to_vec() });
    }

    /// A row whose samples were taken already.
    pub fn add_measured(&mut self, row: Row) {
        if self.wants(&row.name) {
            eprintln!("  {}", row.name);
            self.rows.push(row);
        }
    }

    pub fn note(&mut self, text: String) {
        self.notes.push(text);
    }

    /// The rows that do not meet their bar.
    pub fn missed(&self) -> Vec<&str> {
        self.rows.iter().filter(|row| !row.is_ok()).map(|row| row.name.as_str()).collect()
    }

    /// Whether the program says so by its exit status: times of few samples are not judged.
    pub fn is_failed(&self) -> bool {
        self.effort == Effort::Full && !self.missed().is_empty()
    }
}

pub fn median(samples: impl Iterator<Item = f64>) -> f64 {
    let mut samples: Vec<f64> = samples.collect();
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(f64::NAN)
}

pub fn shown(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Nanoseconds if value < 1e3 => format!("{value:.0} ns"),
        Unit::Nanoseconds if value < 1e6 => format!("{:.1} us", value / 1e3),
        Unit::Nanoseconds => format!("{:.1} ms", value / 1e6),
        Unit::Percent if value < 10.0 => format!("{value:.2} %"),
        Unit::Percent => format!("{value:.1} %"),
        Unit::GigabytesPerSecond => format!("{value:.1} GB/s"),
        Unit::Count if value.fract() != 0.0 => format!("{value:.1}"),
        Unit::Count => format!("{value:.0}"),
    }
}

/// A ratio with as many digits as say something.
pub fn shown_ratio(ratio: f64) -> String {
    match ratio {
        _ if ratio >= 10.0 => format!("{ratio:.0}"),
        _ if ratio >= 0.1 => format!("{ratio:.2}"),
        _ if ratio >= 0.001 => format!("{ratio:.3}"),
        0.0 => "0".into(),
        _ => format!("{ratio:.1e}"),
    }
}
