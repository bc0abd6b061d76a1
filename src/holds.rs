//! Blocks that a captured graph may use at any replay: what holds them, and how the end of the graph is known.
//!
//! A user object that is given to the graph sets a flag when the graph, everything made of it and every launch in
//! flight are gone. Where the driver has none, the caller can say it, by the end of a [`GraphHold`].

use crate::driver::{CaptureInfo, Driver, EndFlag, GraphHandle, StreamHandle};
use crate::error::CallError;
use crate::report::say;
use crate::sync::{Arc, Mutex};

/// One graph, or the caller's word for it.
#[derive(Debug)]
pub(crate) struct Hold {
    /// The driver's number of the capture; no two have the same. `None` for the caller's word.
    capture: Option<u64>,
    end: EndFlag,
}

impl Hold {
    fn new(capture: Option<u64>, end: EndFlag) -> Arc<Self> {
        Arc::new(Self { capture, end })
    }

    pub(crate) fn is_over(&self) -> bool {
        self.end.is_set()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Otherwise the driver may still set it, and the word is left alone for ever.
        if self.end.is_set() {
            self.end.give_back();
        }
    }
}

/// The caller's word that a graph may use a buffer: while it lives, the pool does not touch the memory. Made by
/// [`PinnedBuffer::hold_for_graph`](crate::PinnedBuffer::hold_for_graph).
///
/// Keep it with the graph, and let it go after the graph. One that is never dropped holds the memory for ever.
#[derive(Debug)]
#[must_use = "the memory is held until it is dropped"]
pub struct GraphHold {
    hold: Arc<Hold>,
}

impl GraphHold {
    pub(crate) fn new() -> Self {
        Self { hold: Hold::new(None, EndFlag::new()) }
    }
}

impl Drop for GraphHold {
    fn drop(&mut self) {
        self.hold.end.set();
    }
}

/// What a capture makes of a block that is used in it.
#[derive(Debug, Clone)]
pub(crate) enum Captured {
    /// Held until then.
    Until(Arc<Hold>),
    /// The driver has nothing that would say when the graph is gone.
    ForEver,
    /// The capture was broken: there will be no graph, and nothing runs.
    IntoNothing,
}

impl Captured {
    /// Whether the graph is known to be gone.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Captured::Until(hold) => hold.is_over(),
            Captured::ForEver => false,
            Captured::IntoNothing => true,
        }
    }
}

/// What a block is held for.
#[derive(Debug, Default)]
pub(crate) struct BlockHolds {
    holds: Vec<Arc<Hold>>,
    /// It was captured into a graph whose end nobody will tell.
    is_for_ever: bool,
}

impl BlockHolds {
    pub(crate) fn add(&mut self, captured: Captured) {
        match captured {
            Captured::ForEver => self.is_for_ever = true,
            Captured::IntoNothing => {}
            Captured::Until(hold) if self.holds.iter().any(|other| Arc::ptr_eq(other, &hold)) => {}
            Captured::Until(hold) => self.holds.push(hold),
        }
    }

    /// The caller answers for every capture so far whose end nobody would tell.
    pub(crate) fn cover(&mut self, by: &GraphHold) {
        self.is_for_ever = false;
        self.add(Captured::Until(by.hold.clone()));
    }

    /// Whether there will be an end.
    pub(crate) fn can_end(&self) -> bool {
        !self.is_for_ever
    }

    /// Whether every graph is gone.
    pub(crate) fn are_over(&self) -> bool {
        !self.is_for_ever && self.holds.iter().all(|hold| hold.is_over())
    }

    pub(crate) fn clear(&mut self) {
        self.holds.clear();
        self.is_for_ever = false;
    }
}

/// The graphs that blocks of one pool are held for: one user object for all blocks that go into one graph.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    graphs: Mutex<Vec<Arc<Hold>>>,
}

impl Holds {
    /// What holds a block that is used by a stream which captures: a user object of the graph. Handles 0 to 2 mean
    /// something in the current context only, which must be the stream's.
    pub(crate) fn of_capture(&self, driver: &Driver, stream: StreamHandle) -> Captured {
        let (capture, graph) = match driver.api().capture_info(stream) {
            Ok(CaptureInfo::Graph(capture, graph)) => (capture, graph),
            Ok(CaptureInfo::Broken) => return Captured::IntoNothing,
            Ok(CaptureInfo::Nothing) | Err(_) => return Captured::ForEver,
        };
        let known = |graphs: &Vec<Arc<Hold>>| {
            graphs.iter().find(|hold| hold.capture == Some(capture) && !hold.is_over()).cloned()
        };
        if let Some(hold) = known(&self.graphs.lock()) {
            return Captured::Until(hold);
        }
        match tie_to(driver, graph) {
            Ok(end) => {
                let hold = Hold::new(Some(capture), end);
                let mut graphs = self.graphs.lock();
                graphs.retain(|other| !other.is_over());
                graphs.push(hold.clone());
                Captured::Until(hold)
            }
            Err(error) => {
                say!(DEBUG, "not_held", %error, "a captured buffer cannot be held by its graph");
                Captured::ForEver
            }
        }
    }
}

/// A flag that is set when the graph is gone.
fn tie_to(driver: &Driver, graph: GraphHandle) -> Result<EndFlag, CallError> {
    let end = EndFlag::new();
    let object = driver.api().create_user_object(end).inspect_err(|_| end.give_back())?;
    driver.api().give_user_object(graph, object).inspect_err(|_| {
        // Its function runs some time after this, so the word is not used again.
        if let Err(error) = driver.api().release_user_object(object) {
            say!(DEBUG, "user_object_leaked", %error, "a user object is leaked");
        }
    })?;
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_s_word_covers_what_was_captured_before_it_and_nothing_later() {
        let mut holds = BlockHolds::default();
        holds.add(Captured::ForEver);
        assert!(!holds.can_end() && !holds.are_over());
        let word = GraphHold::new();
        holds.cover(&word);
        assert!(holds.can_end() && !holds.are_over());
        drop(word);
        assert!(holds.are_over());
        holds.add(Captured::ForEver);
        assert!(!holds.can_end() && !holds.are_over());
        holds.clear();
        assert!(holds.are_over());
    }

    #[test]
    fn a_block_is_held_until_the_last_of_its_graphs_is_gone() {
        let mut holds = BlockHolds::default();
        let flags = [EndFlag::new(), EndFlag::new()];
        for (number, flag) in flags.iter().enumerate() {
            let hold = Hold::new(Some(number as u64), *flag);
            holds.add(Captured::Until(hold.clone()));
            holds.add(Captured::Until(hold));
        }
        assert_eq!(holds.holds.len(), 2, "the same one again is nothing new");
        flags[0].set();
        assert!(!holds.are_over());
        flags[1].set();
        assert!(holds.are_over());
        holds.add(Captured::IntoNothing);
        assert!(holds.are_over());
    }
}
